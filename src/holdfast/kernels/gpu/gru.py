"""The GRU on a GPU, with the signature of `reference.gru`."""

from __future__ import annotations

from torch import Tensor

from holdfast.kernels.gpu import gated_operator
from holdfast.kernels.operands import Resets, Weights


def sequence(x: Tensor, h0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor]:
    """As `reference.gru.sequence`. Products in fp16, state in fp32."""
    return gated_operator.sequence(x, h0, None, resets, weights)[:2]
