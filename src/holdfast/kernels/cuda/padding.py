"""Pads an LSTM or GRU layer to a hidden size that the CUDA kernels take.

A unit with zero weights, biases, state and reset value has gates of 1/2 and a candidate of tanh(0) = 0, so its state stays
exactly 0 in both cells. Its columns of W_hh are zero too, so the other units neither read it nor get a gradient from it.
Autograd cuts the gradients of the padded arguments back to their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.operands import Resets, Weights


def padded_size(hidden_size: int) -> int:
    """The smallest hidden size of the kernels, a multiple of 8 from 16 on, that holds this one."""
    return max(16, -(-hidden_size // 8) * 8)


def pad(
    h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights
) -> tuple[Tensor, Tensor | None, Resets, Weights]:
    """The arguments of a layer, without x, with zeros for units up to `padded_size`. Differentiable."""
    hidden = h0.shape[1]
    more = padded_size(hidden) - hidden

    def units(tensor: Any) -> Any:  # [..., H]
        return tensor if tensor is None else F.pad(tensor, (0, more))

    def gates(tensor: Any, *columns: int) -> Any:  # [G * H, ...]: each gate gets rows of its own
        return tensor if tensor is None else F.pad(tensor.unflatten(0, (-1, hidden)), (*columns, 0, more)).flatten(0, 1)

    w_ih, w_hh, b_ih, b_hh = weights
    padded = Weights(gates(w_ih, 0, 0), gates(w_hh, 0, more), gates(b_ih), gates(b_hh))
    return units(h0), units(c0), resets._replace(h=units(resets.h), c=units(resets.c)), padded


def run_padded(
    run: Callable[..., Any], x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, h_n and c_n (None for a GRU) of `run`, which takes the same arguments, padded; without the padded units."""
    hidden = h0.shape[1]
    y, h_n, c_n = run(x, *pad(h0, c0, resets, weights))

    def cut(tensor: Tensor) -> Tensor:
        return tensor[..., :hidden].contiguous()

    return cut(y), cut(h_n), None if c0 is None else cut(c_n)
