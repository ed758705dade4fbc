"""The LSTM on a GPU, with the signature of `reference.lstm`."""

from __future__ import annotations

from torch import Tensor

from holdfast.kernels.gpu import gated_operator
from holdfast.kernels.operands import Resets, Weights


def sequence(x: Tensor, h0: Tensor, c0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.lstm.sequence`. Products in fp16, state in fp32."""
    return gated_operator.sequence(x, h0, c0, resets, weights)
