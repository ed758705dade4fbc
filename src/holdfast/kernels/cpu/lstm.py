"""The LSTM in C, with the signatures of `reference.lstm`."""

from __future__ import annotations

from torch import Tensor

from holdfast.kernels.cpu import recurrence
from holdfast.kernels.operands import Resets, Weights


def sequence(x: Tensor, h0: Tensor, c0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.lstm.sequence`."""
    return recurrence.sequence(x, h0, c0, resets, weights)[:3]


def sequence_with_cells(
    x: Tensor, h0: Tensor, c0: Tensor, resets: Resets, weights: Weights
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `sequence`, and the cell state after every step, [T, B, H], without gradients."""
    y, h_n, c_n, cells = recurrence.sequence(x, h0, c0, resets, weights, keep_cells=True)
    return y, h_n, c_n, cells[..., : y.shape[-1]].detach()


def step(x: Tensor, h: Tensor, c: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor]:
    """One step without gradients: x [B, I], resets.mask [B] -> (h, c). Gates, pointwise part and reset in one call."""
    return recurrence.step(x, h, c, resets, weights)  # type: ignore[return-value]
