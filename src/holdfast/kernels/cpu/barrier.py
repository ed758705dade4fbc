"""A barrier between processes of one machine, in C: a few microseconds where messages through the kernel take hundreds."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from holdfast.kernels.cpu import library

BYTES_PER_PROCESS = 64
"""Of the counters: a cache line each."""


class Barrier:
    """counters: bytes that the processes share, `BYTES_PER_PROCESS` for each, zeros at first."""

    def __init__(self, counters: Tensor, rank: int, processes: int) -> None:
        handle = library.load().handle
        if handle is None:
            raise RuntimeError(f"the barrier in C is not available: {library.load().reason}")
        self._meet = handle.holdfast_meet
        self._meet.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
        self._meet.restype = ctypes.c_int64
        self._counters = counters  # C knows only its address
        self._place = library.address(counters, BYTES_PER_PROCESS * processes, torch.uint8, "counters"), rank, processes
        self._count = 0

    def arrive(self) -> None:
        """Begin the next meeting. `wait` for it before the one after."""
        self._count += 1

    def wait(self, seconds: float) -> int | None:
        """None when all have arrived; otherwise, after so many seconds, the first process that has not."""
        late = self._meet(*self._place, self._count, int(seconds * 1e9))
        return None if late < 0 else late
