"""Processes of one machine meet, and add up numbers in memory that they share, in C.

Microseconds, where messages through the kernel take hundreds. Who has died, and how long to wait, is the caller's business.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from holdfast.kernels.cpu import library

_COUNTER_BYTES = 64  # of a process: a cache line
_NO_SUM = -2  # see c/exchange.c


_RankSum = library.struct("RankSum")


def bytes_for(processes: int, slot_bytes: int) -> int:
    """How much memory the processes must share."""
    return processes * _COUNTER_BYTES + (processes + 1) * slot_bytes


class Exchange:
    """memory: bytes that the processes share, zeros at first, `bytes_for` as many. slots [processes + 1, slot_bytes]: one
    that each process writes, and one for results.

    A `wait` returns None when all processes have arrived; otherwise, after so many seconds, the first that has not. It may
    then be called again.
    """

    def __init__(self, memory: Tensor, rank: int, processes: int, slot_bytes: int) -> None:
        loaded = library.load()
        if loaded.handle is None:
            raise RuntimeError(f"the exchange in C is not available: {loaded.reason}")
        self._meet, self._sum = loaded.handle.holdfast_meet, loaded.handle.holdfast_sum_ranks
        self._meet.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
        self._sum.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._meet.restype = self._sum.restype = ctypes.c_int64
        begin = library.address(memory, bytes_for(processes, slot_bytes), torch.uint8, "shared memory")
        counters = processes * _COUNTER_BYTES
        self.slots = memory[counters:].view(processes + 1, slot_bytes)  # C knows only its address
        self._job = _RankSum(rank, processes, slot_bytes // 4, begin, begin + counters)

    def arrive(self) -> None:
        """Begin the next meeting."""
        self._job.meeting += 1

    def wait(self, seconds: float) -> int | None:
        """Until all have arrived at this meeting."""
        job = self._job
        return _late(self._meet(job.arrived, job.rank, job.processes, job.meeting, int(seconds * 1e9)))

    def begin_sum(self, x: Tensor) -> None:
        """Replace x, float32 and contiguous, at most a slot of it, by its sum over processes."""
        self._x = x  # C knows only its address
        self._job.x, self._job.count = library.address(x, x.numel(), torch.float32, "what is summed"), x.numel()

    def wait_sum(self, seconds: float) -> int | None:
        """Until the sum is there."""
        return _late(self._sum(ctypes.byref(self._job), int(seconds * 1e9)))


def _late(found: int) -> int | None:
    if found == _NO_SUM:
        raise ValueError("what is summed is larger than a slot")
    return None if found < 0 else found
