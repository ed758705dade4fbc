"""Which tile a Triton recurrence uses: a static table, no tuning at run time."""

from __future__ import annotations

import triton

LARGEST_HIDDEN = 128


def recurrence_tile(hidden_size: int, batch: int) -> tuple[int, int, int]:
    """(padded hidden size, batch rows per program, warps per program)."""
    padded = max(16, triton.next_power_of_2(hidden_size))
    return padded, 16, 8 if padded >= 64 else 4
