"""What both GPU implementations share: the packed operand, the gradient scale, and the products around a recurrence.

Before the recurrence the inputs become fp16 and are projected to gate pre-activations in one product. After its
backward the gate gradients, scaled into fp16's range by a power of two, give dx and all weight gradients.

fp16 keeps 11 significant bits, as TF32 does. Inputs beyond 65,504 saturate (they would saturate the gates too)
and inputs below 6e-5 lose relative precision. Gradients have no natural range, so they are scaled: the largest
incoming gradient becomes about 1/16, which leaves a factor of a million for growth on the way back through time.

`cuda_recurrence.py` does the conversions here in its own kernels; `triton_layer.py` uses these functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_HALF = 65504.0


class Gradients(NamedTuple):
    """Of all that a layer takes, None where not asked for; dc0 is scratch for the GRU.

    Bias gradients have the weights' dtype.
    """

    dx: Tensor | None
    dh0: Tensor | None
    dc0: Tensor | None
    d_fill_h: Tensor | None
    d_fill_c: Tensor | None
    dw_ih: Tensor
    dw_hh: Tensor
    db_ih: Tensor
    db_hh: Tensor


def packed_layout(inputs: int, hidden: int) -> tuple[int, int]:
    """(first column of h, row width) of the packed operand [x | h]: multiples of 8, for 16-byte rows."""
    first = -(-inputs // 8) * 8
    return first, first + -(-hidden // 8) * 8


def kept_layout(rows: int, inputs: int, hidden: int, gates: int) -> tuple[int, int, int]:
    """What a forward keeps for the backward, in one fp16 tensor: packed [rows, width] first; returns the first element of
    the gates [rows, gates * H] and of one more value per unit [rows, H], and the number of elements."""
    width = packed_layout(inputs, hidden)[1]
    return rows * width, rows * (width + gates * hidden), rows * (width + (gates + 1) * hidden)


def split_kept(kept: Tensor, inputs: int, hidden: int, gates: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed [rows, width], gates [rows, gates * H] and the other values [rows, H], as views."""
    rows = kept.shape[0] // kept_layout(1, inputs, hidden, gates)[2]
    first, second, _ = kept_layout(rows, inputs, hidden, gates)
    return kept[:first].view(rows, -1), kept[first:second].view(rows, -1), kept[second:].view(rows, -1)


def pack_inputs(packed: Tensor, x: Tensor) -> None:
    """x [T, B, I] into the first columns of packed [T * B, width]; the h columns are for the recurrence to fill."""
    inputs = x.shape[2]
    packed[:, :inputs] = x.reshape(-1, inputs).clamp(-LARGEST_HALF, LARGEST_HALF)
    packed[:, inputs:] = 0.0


def gradient_amax_bits(*gradients: Tensor | None) -> Tensor:
    """The bits of the largest absolute value among the gradients, NaN aside: [1] int32, on the device."""
    largest = [g.float().abs().nan_to_num(0.0, posinf=float("inf")).amax() for g in gradients if g is not None]
    return torch.stack(largest).amax().reshape(1).view(torch.int32)


def inverse_scale(amax_bits: Tensor) -> Tensor:
    """What undoes the gradient scale, [1] fp32: the power of two 16 times the amax's, 1 if that is 0 or not finite."""
    exponent = (amax_bits >> 23) & 0xFF
    usable = (exponent > 0) & (exponent < 250)
    return (torch.where(usable, exponent + 4, 127) << 23).view(torch.float32)


def half_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of fp16 operands with an fp32 result: sums over T * B leave fp16's range."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
