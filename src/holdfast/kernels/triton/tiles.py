"""Which tile a Triton recurrence uses: a static choice, without tuning at run time. Does not import Triton."""

from __future__ import annotations

LARGEST_HIDDEN = 128  # W_hh in fp16 and one tile of rows fit in the registers and shared memory of one multiprocessor


def recurrence_tile(hidden_size: int) -> tuple[int, int, int]:
    """(padded hidden size, batch rows per program, warps per program)."""
    padded = max(16, 1 << (hidden_size - 1).bit_length())
    return padded, 16, 8 if padded >= 64 else 4
