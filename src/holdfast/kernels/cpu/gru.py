"""The GRU in C, with the signatures of `reference.gru`."""

from __future__ import annotations

from torch import Tensor

from holdfast.kernels.cpu import recurrence
from holdfast.kernels.operands import Resets, Weights


def sequence(x: Tensor, h0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor]:
    """As `reference.gru.sequence`."""
    return recurrence.sequence(x, h0, None, resets, weights)[:2]


def step(x: Tensor, h: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor]:
    """One step without gradients: x [B, I], resets.mask [B] -> (h,)."""
    return recurrence.step(x, h, None, resets, weights)  # type: ignore[return-value]
