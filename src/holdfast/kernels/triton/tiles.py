"""How rows are divided over the programs of a Triton kernel. Does not import Triton."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """How many rows a program takes at a time, its warps, and how many programs a multiprocessor gets."""

    rows: int
    warps: int
    per_processor: int = 1

    def for_sums(self) -> Tile:
        """Itself. Sums of products in fp32 need fewer than 16 rows: Triton makes a TF32 product of larger ones, which is wrong
        for fewer than 16 columns (Triton 3.6)."""
        if self.rows >= 16:
            raise ValueError(f"a tile of sums has {self.rows} rows; it must have fewer than 16")
        return self


def padded(size: int, least: int = 16) -> int:
    """A power of two that is `least` or more; a product on tensor cores takes 16 rows or columns."""
    return max(least, 1 << (size - 1).bit_length())


@functools.cache
def _processors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs_for(rows: int, block: int, device: torch.device, per_processor: int) -> int:
    """How many programs share these rows, `block` at a time; a few in the interpreter."""
    most = per_processor * (_processors(device.index) if device.type == "cuda" else 1)
    return max(1, min(most, -(-rows // block)))
