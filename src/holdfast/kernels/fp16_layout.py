"""What the CUDA and the Triton kernels share: the layout of fp16 tensors, and the scale of fp16 gradients.

Before the recurrence the inputs become fp16 and are projected to gate pre-activations in one product. After its backward
the gate gradients, scaled into fp16's range by a power of two, give dx and all weight gradients.

fp16 keeps 11 significant bits, as TF32 does. Inputs beyond 65,504 saturate (they would saturate the gates too), and
inputs below 6e-5 lose relative precision. Gradients have no natural range, so they are scaled: the largest incoming
gradient becomes about 1/16, which leaves a factor of a million for growth on the way back through time.

`cuda/` does the conversions in its own kernels; `triton/layer.py` uses the functions of this file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_HALF = 65504.0


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


def split_kept(kept: Tensor, inputs: int, hidden: int, gates: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of `kept_layout` as views: packed, gates and values."""
    rows = kept.shape[0] // kept_layout(1, inputs, hidden, gates)[2]
    first, second, _ = kept_layout(rows, inputs, hidden, gates)
    return kept[:first].view(rows, -1), kept[first:second].view(rows, -1), kept[second:].view(rows, -1)


def pack_inputs(packed: Tensor, x: Tensor) -> None:
    """x [T, B, I] into the first columns of packed [T * B, width]; the recurrence fills the h columns."""
    inputs = x.shape[2]
    packed[:, :inputs] = x.reshape(-1, inputs).clamp(-LARGEST_HALF, LARGEST_HALF)
    packed[:, inputs:] = 0.0


def gradient_amax_bits(*gradients: Tensor | None) -> Tensor:
    """The bits of the largest absolute value among the gradients, ignoring NaN: [1] int32, on the device."""
    largest = [g.float().abs().nan_to_num(0.0, posinf=float("inf")).amax() for g in gradients if g is not None]
    return torch.stack(largest).amax().reshape(1).view(torch.int32)


def inverse_scale(amax_bits: Tensor) -> Tensor:
    """Undoes the gradient scale, [1] fp32: 16 times the amax's power of two, or 1 if the amax is 0 or not finite."""
    exponent = (amax_bits >> 23) & 0xFF
    usable = (exponent > 0) & (exponent < 250)
    return (torch.where(usable, exponent + 4, 127) << 23).view(torch.float32)


def half_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of fp16 operands with an fp32 result: sums over T * B leave fp16's range."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
