"""Sums over the rows of a matrix in Triton, in a fixed order, so that repeats are bit-identical."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 128, 32  # of one tile
_SLICES = 128  # at most so many programs share a column


@triton.jit(do_not_specialize=["rows", "width", "slice_rows"])
def sum_kernel(matrix, total, rows, width, slice_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total[s, j] = sum of matrix[:, j] over the rows of slice s."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    begin = tl.program_id(1) * slice_rows
    end = tl.minimum(begin + slice_rows, rows)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        acc += tl.load(matrix + row.to(tl.int64) * width + column, mask=(row < end) & (column < width), other=0.0)
    tl.store(total + tl.program_id(1) * width + column, tl.sum(acc, 0)[None, :], mask=column < width)


def _sum_slices(matrix: Tensor, slices: int) -> Tensor:
    rows, width = matrix.shape
    total = torch.empty(slices, width, dtype=torch.float32, device=matrix.device)
    grid = (triton.cdiv(width, _COLUMNS), slices)
    sum_kernel[grid](matrix, total, rows, width, triton.cdiv(rows, slices), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8)
    return total


def sum_rows(matrix: Tensor) -> Tensor:
    """matrix.sum(0) of a contiguous float32 matrix."""
    slices = min(_SLICES, triton.cdiv(matrix.shape[0], 4 * _ROWS))
    return _sum_slices(matrix if slices == 1 else _sum_slices(matrix, slices), 1)[0]
