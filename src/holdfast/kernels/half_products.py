"""The matrix products around a GPU recurrence, in fp16 with fp32 accumulation, and the conversions they need.

Before the recurrence: the inputs become fp16 and are projected to gate pre-activations in one product. After its
backward: the gate gradients, scaled into fp16's range by a power of two, give dx and both weight gradients.

`fp16` keeps 11 significant bits, as TF32 does. Inputs beyond 65,504 saturate (they would saturate the gates too)
and inputs below 6e-5 lose relative precision. Gradients have no natural range, so they are scaled: the largest
incoming gradient becomes about 1/16, which leaves a factor of a million for growth on the way back through time.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scale_from_amax(amax_bits):
    """A power of two that brings the amax to [1/16, 1/8); 1 when it is 0 or not finite. Scale times inverse is 1."""
    exponent = (amax_bits >> 23) & 0xFF
    usable = (exponent > 0) & (exponent < 250)
    scale = tl.where(usable, (250 - exponent) << 23, 127 << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(usable, (exponent + 4) << 23, 127 << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit(do_not_specialize=["size"])
def amax_kernel(source, amax_bits, size, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.float32)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, stride):
        offsets = start + tl.arange(0, BLOCK)
        largest = tl.maximum(
            largest, tl.abs(tl.load(source + offsets, mask=offsets < size, other=0.0).to(tl.float32))
        )
    # The bits of non-negative floats are ordered as the floats are, so an integer maximum is exact and deterministic.
    tl.atomic_max(amax_bits, tl.max(largest, axis=0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["rows"])
def convert_kernel(
    source, target, amax_bits, rows, COLS: tl.constexpr, source_stride, target_stride,
    ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """target[r, c] = source[r, c], divided by the gradient scale where amax_bits is given, clamped to +-LIMIT."""
    row = tl.program_id(0).to(tl.int64) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[:, None]
    col = tl.program_id(1) * COL_BLOCK + tl.arange(0, COL_BLOCK)[None, :]
    mask = (row < rows) & (col < COLS)
    value = tl.load(source + row * source_stride + col, mask=mask, other=0.0).to(tl.float32)
    if amax_bits is not None:
        _, inverse = scale_from_amax(tl.load(amax_bits))
        value = value * inverse
    if LIMIT > 0:  # comparisons with NaN are false, so NaN passes through
        value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    tl.store(target + row * target_stride + col, value.to(target.dtype.element_ty), mask=mask)


def convert(source: Tensor, target: Tensor, amax_bits: Tensor | None = None, limit: float = 0.0) -> None:
    """Writes `source` [R, C] into `target` [R, C]; rows may be strided, columns may not."""
    rows, cols = source.shape
    if rows == 0 or cols == 0:
        return
    col_block = min(128, triton.next_power_of_2(cols))
    row_block = max(1, 2048 // col_block)
    grid = (triton.cdiv(rows, row_block), triton.cdiv(cols, col_block))
    convert_kernel[grid](
        source, target, amax_bits, rows, cols, source.stride(0), target.stride(0),
        ROW_BLOCK=row_block, COL_BLOCK=col_block, LIMIT=limit,
    )  # fmt: skip


def pack_width(input_size: int, hidden_size: int) -> tuple[int, int]:
    """(first column of h, row width) of the packed operand [x | h]: both multiples of 8 for 16-byte rows."""
    first = -(-input_size // 8) * 8
    return first, first + -(-hidden_size // 8) * 8


def pack_inputs(x: Tensor, hidden_size: int) -> Tensor:
    """[T * B, width] fp16 whose first columns are x; the h columns are for the recurrence to fill."""
    steps, batch, inputs = x.shape
    _, width = pack_width(inputs, hidden_size)
    packed = torch.empty(steps * batch, width, dtype=torch.float16, device=x.device)
    convert(x.reshape(steps * batch, inputs), packed[:, :inputs], limit=65504.0)
    return packed


def project(packed: Tensor, w_ih: Tensor) -> Tensor:
    """Gate pre-activations without bias, [T * B, G] fp16."""
    return torch.mm(packed[:, : w_ih.shape[1]], w_ih.to(torch.float16).t())


def mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of fp16 operands with an fp32 result: sums over T * B leave fp16's range."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def gradient_amax(*gradients: Tensor | None) -> Tensor:
    """The bits of the largest absolute value among the gradients, [1] int32, on the device."""
    given = [g for g in gradients if g is not None]
    amax_bits = torch.zeros(1, dtype=torch.int32, device=given[0].device)
    for gradient in given:
        size = gradient.numel()
        if size:
            amax_kernel[(min(528, triton.cdiv(size, 4096)),)](gradient, amax_bits, size, BLOCK=4096)
    return amax_bits


def unscaled_column_sums(d_gates: Tensor, amax_bits: Tensor) -> Tensor:
    """Bias gradients [G] fp32 from scaled gate gradients [R, G]."""
    sums = d_gates.sum(0, keepdim=True, dtype=torch.float32)
    unscaled = torch.empty_like(sums)
    convert(sums, unscaled, amax_bits)
    return unscaled[0]
