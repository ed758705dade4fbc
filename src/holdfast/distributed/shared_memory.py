"""Sums and gathers over ranks of one machine through memory that they share: microseconds, where gloo takes a millisecond.

gloo hands each message to a thread and to the kernel, and wakes a thread that sleeps on the other side; on a CPU that costs
more than adding the numbers. Here each rank writes its numbers into its slot, waits for the others in C, and adds up its
part of all slots for everybody: every element is computed once, in the order of ranks, so all ranks have the same bits.

A rank that ends holds no lock on its byte of the file any more, however it ended; the others then raise an error.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.kernels.cpu import library

# --- in C ------------------------------------------------------------------------------------------------------------
# Processes of one machine meet, and add up numbers in memory that they share, in C.
#
# Microseconds, where messages through the kernel take hundreds. Who has died, and how long to wait, is the caller's business.


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


FOLDER = Path("/dev/shm")
SLOT_BYTES = 2**20
"""Numbers of a rank go through its slot in pieces of this size, which stay in the cache."""
_HEADER_BYTES = 64
_SECONDS_BETWEEN_LOOKS = 0.2


class RankEndedError(RuntimeError):
    """Another process of the run is gone."""


class RankLateError(RankEndedError, TimeoutError):
    """Another process of the run does not answer."""


class SharedMemory:
    """All ranks call the same functions in the same order, with tensors of equal shapes on the CPU."""

    def __init__(self, file: int, rank: int, size: int, patience: float) -> None:
        import fcntl

        self._file, self._rank, self._size, self._patience = file, rank, size, patience
        memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        self._exchange = Exchange(memory[_HEADER_BYTES:], rank, size, SLOT_BYTES)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)  # until this process ends

    def sum_(self, x: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if x.dtype is not torch.float32:  # a few numbers
            return x.copy_(self.all_gather(x).sum(0, dtype=x.dtype))
        flat = x.contiguous().view(-1)
        for piece in flat.split(SLOT_BYTES // x.element_size()):
            self._exchange.begin_sum(piece)
            self._until_all(self._exchange.wait_sum)
        return x if x.is_contiguous() else x.copy_(flat.view(x.shape))

    def all_gather(self, x: Tensor) -> Tensor:
        """[ranks, ...]: the tensor of each."""
        flat = x.contiguous().view(-1)
        slots, out = self._exchange.slots.view(x.dtype), x.new_empty((self._size, len(flat)))
        for piece, gathered in zip(flat.split(slots.shape[1]), out.split(slots.shape[1], 1)):
            slots[self._rank, : len(piece)].copy_(piece)
            self._meet()
            gathered.copy_(slots[: self._size, : len(piece)])
            self._meet()  # nobody writes the next piece before all have read this one
        return out.view(self._size, *x.shape)

    def _meet(self) -> None:
        self._exchange.arrive()
        self._until_all(self._exchange.wait)

    def _until_all(self, wait: Callable[[float], int | None]) -> None:
        late = wait(_SECONDS_BETWEEN_LOOKS)
        if late is None:
            return
        gives_up = time.monotonic() + self._patience
        while late is not None:
            if self._has_ended(late) and wait(0) == late:
                raise RankEndedError(
                    f"rank {late} has ended while rank {self._rank} waited for it; look for its error above, and resume the run"
                )
            if time.monotonic() > gives_up:
                raise RankLateError(
                    f"rank {self._rank} waited {self._patience:.0f} seconds for rank {late}, which runs but does not "
                    "answer; HOLDFAST_RANK_TIMEOUT sets how many seconds to wait"
                )
            late = wait(_SECONDS_BETWEEN_LOOKS)

    def _has_ended(self, rank: int) -> bool:
        import fcntl

        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)  # others look too
        return True

    def close(self) -> None:
        """Give up the file; the memory goes with the last process."""
        os.close(self._file)


def share_memory(rank: int, size: int, patience: float) -> SharedMemory | None:
    """Memory shared by all ranks of the process group; None on all of them if they are on several machines, without the C
    library, or without room in /dev/shm. HOLDFAST_SHARED_MEMORY=0 on any rank refuses it."""
    path, mark = _create(size) if rank == 0 else (None, b"")
    box: list[tuple[str, bytes] | None] = [(path, mark) if path else None]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return None
    try:
        found = _open(*box[0], rank, size, patience)
        everybody = torch.tensor(float(found is not None))
        dist.all_reduce(everybody)
    finally:
        if path:
            os.unlink(path)  # who has it open keeps it; nothing is left behind, however the run ends
    if found is not None and everybody < size:
        found.close()
        return None
    return found


def _create(size: int) -> tuple[str | None, bytes]:
    """A file that only this user can open, with a mark that no other has."""
    mark = os.urandom(_HEADER_BYTES)
    total = _HEADER_BYTES + bytes_for(size, SLOT_BYTES)
    if not FOLDER.is_dir() or os.environ.get("HOLDFAST_SHARED_MEMORY") == "0":
        return None, mark
    path = None
    try:
        file, path = tempfile.mkstemp(prefix="holdfast-", dir=FOLDER)
        try:
            os.posix_fallocate(file, 0, total)  # without room this is an error; touching the memory would be a signal
            os.pwrite(file, mark, 0)
        finally:
            os.close(file)
    except OSError:
        if path:
            os.unlink(path)
        return None, mark
    return path, mark


def _open(path: str, mark: bytes, rank: int, size: int, patience: float) -> SharedMemory | None:
    if os.environ.get("HOLDFAST_SHARED_MEMORY") == "0":
        return None
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # another machine, or another container
        return None
    try:
        if os.pread(file, _HEADER_BYTES, 0) == mark:
            return SharedMemory(file, rank, size, patience)
    except (OSError, RuntimeError):  # no locks, or no C library
        pass
    os.close(file)
    return None
