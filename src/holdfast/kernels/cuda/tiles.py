"""Which tiles the CUDA recurrence uses: a static table for sm_90, derived by `benchmarks/gpu_tiles.py`."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a recurrence is divided into tiles; `recurrence_common.cuh` explains the constants named here."""

    units: int  # NH: hidden units of one block
    warp_units: int  # WU: hidden units of one warp, 8, 16 or 32
    warp_rows: int = 1  # WARP_ROWS: warps of a team along the batch rows
    row_tiles: int = 1  # MT: tiles of 16 rows of one warp
    halves: int = 2  # HALVES: 1 for tiles of 8 rows
    teams: int = 1  # TEAMS
    columns: int = 0  # KC: columns of one pipeline stage; 0 for all at once
    stages: int = 1  # STAGES
    registers: bool = False  # W_REGISTERS
    share: int = 1  # SHARE, of a backward: blocks that divide the columns of their product
    cluster: bool = (
        False  # CLUSTER, where the GPU has them: blocks exchange in shared memory; no columns, stages or share
    )

    @property
    def rows(self) -> int:
        """Batch rows that a team handles at a time."""
        return 8 * self.halves * self.row_tiles * self.warp_rows

    @property
    def threads(self) -> int:
        return 32 * self.teams * self.warp_rows * (self.units // self.warp_units)

    def split(self, hidden_size: int) -> int:
        """Blocks that share one batch group."""
        return -(-hidden_size // self.units)

    def depth(self, hidden_size: int, gates: int, backward: bool) -> int:
        """Columns of the operand that holds the rows, padded."""
        depth = hidden_size * gates // self.share if backward else hidden_size
        multiple = self.columns if self.columns and self.split(hidden_size) > 1 else 16
        return -(-depth // multiple) * multiple

    def sharing(self, share: int, hidden_size: int, gates: int) -> Tile:
        """With so many blocks that divide the columns of a backward's product, or the largest number below that divides evenly."""
        while share > 1 and (hidden_size % (self.units * share) or hidden_size * gates % (share * self.columns)):
            share //= 2
        return self._replace(share=share)

    def shared_bytes(self, hidden_size: int, gates: int, backward: bool) -> int:
        """Dynamic shared memory of one block: its slice of W_hh and the rows its teams multiply with."""
        if self.cluster:
            split, columns = self.split(hidden_size), (self.units * gates if backward else hidden_size)
            row = -(-columns // 16) * 16 + 8
            messages = 4 * (split - 1) * self.rows * self.units  # two of fp32, in elements of fp16
            operand = self.rows * row + messages if backward else 2 * self.rows * row
            return 2 * (self.units * (split if backward else gates) * row + self.teams * operand)
        depth = self.depth(hidden_size, gates, backward)
        weights = self.units * (self.share if backward else gates) * (depth + 8)
        whole = self.split(hidden_size) == 1 or not self.columns
        operand = self.rows * (depth + 8) if whole else self.stages * self.rows * (self.columns + 8)
        return 2 * (weights + self.teams * operand)


def choose_tile(gates: int, hidden_size: int, batch: int, backward: bool, one_step: bool = False) -> Tile:
    """The tile for `batch` rows of this hidden size. The limits assume 132 multiprocessors; any choice is correct.

    one_step: the sequence is a step of a rollout, in which reading the weights takes most of the time.
    """
    if hidden_size <= 128:
        units = -(-hidden_size // 16) * 16
        if one_step and batch > 1056 and gates == 4:
            return Tile(units, 16, warp_rows=2)
        if batch <= 1056:
            return Tile(units, 16, halves=1, registers=True)
        if backward and hidden_size > 64:
            units = -(-hidden_size // 32) * 32
            return Tile(units, 32, teams=2) if gates == 3 else Tile(units, 32, warp_rows=2)
        return Tile(units, 16, teams=2 if gates == 3 else 1)
    if hidden_size <= 256:
        if batch <= 264:
            return Tile(32, 8, halves=1, registers=True, cluster=batch <= 240)
        if batch <= 2112:
            return Tile(64, 16, teams=2, columns=128, stages=2)
        tile = Tile(64, 16, teams=4, columns=64 if backward else 128, stages=4 if backward else 2)
        return tile.sharing(2, hidden_size, gates) if backward and gates == 4 else tile
    if hidden_size <= 512:
        if batch <= 512:
            return Tile(32, 16, teams=2, columns=256, stages=2)
        if gates == 3:
            return Tile(64, 32 if backward else 16, teams=4, columns=64, stages=3)
        tile = Tile(32, 32, warp_rows=2, teams=4, columns=64, stages=3)
        return tile.sharing(2, hidden_size, gates) if backward else tile
    if gates == 3:
        tile = Tile(32, 16, teams=4, columns=64, stages=3)
    else:
        tile = Tile(16, 16, warp_rows=4 if backward else 2, teams=2 if backward else 4, columns=64, stages=4)
    return (
        tile.sharing(4, hidden_size, gates) if backward and batch >= 64 else tile
    )  # with fewer rows, L2 is fast enough


def tile_for(
    gates: int,
    hidden_size: int,
    batch: int,
    backward: bool,
    processors: int,
    shared_bytes: int,
    one_step: bool = False,
) -> Tile | None:
    """The table's tile; on a GPU too small for it, the largest slice of W_hh that fits (by a model, not measured)."""

    def fits(tile: Tile) -> bool:
        return tile.shared_bytes(hidden_size, gates, backward) <= shared_bytes and tile.split(hidden_size) <= processors

    smaller = (Tile(units, min(units, 16), teams=2, columns=64, stages=2) for units in (64, 32, 16, 8))
    return next(filter(fits, (choose_tile(gates, hidden_size, batch, backward, one_step), *smaller)), None)
