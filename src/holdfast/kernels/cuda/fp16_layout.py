"""The layout of what a forward keeps for its backward: fp16 tensors.

Before the recurrence the inputs become fp16 and are projected to gate pre-activations in one product. After its backward
the gate gradients, scaled into fp16's range by a power of two, give dx and all weight gradients.

fp16 keeps 11 significant bits, as TF32 does. Inputs beyond 65,504 saturate (they would saturate the gates too), and
inputs below 6e-5 lose relative precision. Gradients have no natural range, so they are scaled: the largest incoming
gradient becomes about 1/16, which leaves a factor of a million for growth on the way back through time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Saved(NamedTuple):
    """What a backward gets from its forward."""

    kept: Tensor  # fp16, see `kept_layout`
    mask: Tensor | None  # resets [T, B]
    w_ih: Tensor
    w_hh: Tensor
    batch: int
    state_dtype: torch.dtype
    x_dtype: torch.dtype


def packed_layout(inputs: int, hidden: int) -> tuple[int, int]:
    """(first column of h, row width) of the packed operand [x | h]: multiples of 8, for 16-byte rows."""
    first = -(-inputs // 8) * 8
    return first, first + -(-hidden // 8) * 8


def kept_layout(rows: int, inputs: int, hidden: int, gates: int) -> tuple[int, int, int]:
    """The fp16 tensor that a forward keeps for the backward: packed [rows, width], gates [rows, gates * H] and one more
    value per unit [rows, H]. Returns the first element of the gates and of the values, and the number of elements."""
    width = packed_layout(inputs, hidden)[1]
    return rows * width, rows * (width + gates * hidden), rows * (width + (gates + 1) * hidden)
