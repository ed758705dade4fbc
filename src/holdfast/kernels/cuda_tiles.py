"""Which tiles the CUDA recurrence uses: a static table for sm_90, derived by `benchmarks/gpu_tiles.py`."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a recurrence is cut. Names as in `recurrence_common.cuh`."""

    units: int  # NH, hidden units of one block
    warp_units: int  # WU, hidden units of one warp: 8, 16 or 32
    row_tiles: int  # MT, tiles of 16 rows of one warp
    warp_rows: int  # warps along the rows
    columns: int = 64  # KC, columns of one pipeline stage
    stages: int = 4

    @property
    def rows(self) -> int:
        """Batch rows that a block handles at a time."""
        return 16 * self.row_tiles * self.warp_rows

    @property
    def threads(self) -> int:
        return 32 * self.warp_rows * (self.units // self.warp_units)

    def split(self, hidden_size: int) -> int:
        """Blocks that share one batch group."""
        return -(-hidden_size // self.units)

    def shared_bytes(self, hidden_size: int, gates: int, backward: bool) -> int:
        """Dynamic shared memory of one block: its slice of W_hh and the rows it multiplies with."""
        alone = self.split(hidden_size) == 1
        depth = hidden_size * gates if backward else hidden_size
        multiple = 16 if alone else self.columns
        depth = -(-depth // multiple) * multiple
        weight_rows = self.units * (1 if backward else gates) + 8
        operand = self.rows * (depth + 8) if alone else self.stages * self.rows * (self.columns + 8)
        return 2 * (weight_rows * (depth + 8) + operand)


def choose_tile(gates: int, hidden_size: int, batch: int, backward: bool) -> Tile:
    """The tile for `batch` rows of this hidden size."""
    if hidden_size <= 128:
        units = -(-hidden_size // 16) * 16
        return Tile(units, 16, 1, 1 if batch <= 2112 else 2)
    units = 32 if hidden_size <= 512 else 16
    groups = 132 // -(-hidden_size // units)
    rows = -(-batch // groups)
    if rows <= 16:
        return Tile(units, 8, 1, 1)
    if rows <= 32:
        return Tile(units, 8, 1, 2)
    if rows <= 64:
        return Tile(units, 16, 1, 4)
    return Tile(units, 16, 2, 4, stages=3 if hidden_size > 256 else 4)
