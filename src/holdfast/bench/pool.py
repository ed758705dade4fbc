"""Runs jobs in several worker processes at once and yields what they answer.

On a GPU the processes share it: while one captures graphs, evaluates or saves, the others compute. With NVIDIA's MPS
their kernels also run at the same time instead of in turns. On CPUs each process has one thread.

A worker that dies is replaced, and its job is given to the new one, once. One whose run failed on a GPU is replaced too.
Under MPS a fault of one process is reported to all, as if each had made it. So a run that fails there, for whatever reason, is
tried once more when the others are over, without MPS; what it reports then is its own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

from holdfast.bench.jobs import Job
from holdfast.distributed.processes import Child, Processes

SECONDS_TO_SAVE = 60.0
"""How long workers that are told to stop may take to save their runs."""
ATTEMPTS = 2
TICK = 0.25
"""Seconds without news after which `run` gives an event all the same."""
PIPES = dict(
    stdin=PIPE, stdout=PIPE, start_new_session=True
)  # Ctrl-C reaches this process only, which tells the workers


@dataclass
class Event:
    """What a worker reports: `kind` is "started", "steps", "result", "error" or "again" (it failed under MPS, and will be tried
    without); a tick of the clock has no job."""

    kind: str
    job: Job | None = None
    worker: int = 0
    value: Any = None


@dataclass
class Pool:
    """`run` trains jobs in `count` processes, in folders below `folder`. keep: leave the folders of finished runs there.
    mps: see `shared_gpu`. stop_after: seconds after which the runs that are not finished are saved and left."""

    count: int
    folder: Path
    device: str
    keep: bool = False
    mps: bool = False
    stop_after: float = math.inf
    uses_mps: bool = False
    """Whether the workers of `run` do: a machine may not have it."""

    def run(self, jobs: Sequence[Job]) -> Generator[Event, None, None]:
        """Events until all jobs have a result or an error, or the time is over. Closing the iterator stops the workers; they
        save first."""
        self._began, self._attempts = time.monotonic(), Counter[str]()
        waiting, mps = deque(jobs), self.mps
        with Processes(SECONDS_TO_SAVE) as self._processes:
            while waiting and not self._is_over():
                self._again: deque[Job] = deque()  # failed under MPS
                with shared_gpu(self.device, mps) as environment:
                    self.uses_mps = "CUDA_MPS_PIPE_DIRECTORY" in environment
                    try:
                        yield from self._train(waiting, environment)
                    finally:
                        self._processes.stop()
                waiting, mps = self._again, False

    def _is_over(self) -> bool:
        return time.monotonic() - self._began > self.stop_after

    def _train(self, waiting: deque[Job], environment: dict[str, str]) -> Iterator[Event]:
        """Until all of these jobs have ended, or the time is over."""
        command = ["-m", "holdfast.bench.worker", str(self.folder)]
        idle: list[Child] = []
        busy: dict[Child, Job] = {}
        while waiting or busy:
            over = self._is_over()
            if over:
                waiting.clear()
                self._processes.stop()  # a run that has ended meanwhile gives its result below
            elif waiting and len(busy) < self.count:
                worker = idle.pop() if idle else self._processes.start(command, env=environment, **PIPES)
                busy[worker] = job = waiting.popleft()
                self._attempts[job.id] += 1
                worker.send(json.dumps(job.to_dict()))
                yield Event("started", job, worker.number)
                continue
            child, line = self._processes.next(TICK)
            if child is None or child not in busy:  # nothing happened, or a worker ended because it was told to
                yield Event("tick")
                continue
            job, (kind, value) = busy[child], json.loads(line).popitem() if line else ("end", None)
            if kind == "steps":
                yield Event(kind, job, child.number, value)
                continue
            del busy[child]
            if kind == "result":
                yield Event(kind, job, child.number, value)
                if not self.keep:  # not earlier: a command that dies without the result has the run's last checkpoint
                    shutil.rmtree(self.folder / job.id, ignore_errors=True)
            elif over:
                continue
            elif self._attempts[job.id] < ATTEMPTS and self.uses_mps:
                self._again.append(job)
                yield Event("again", job, child.number, value or _reap(child))
            elif self._attempts[job.id] < ATTEMPTS and kind == "end":
                waiting.appendleft(job)
            else:
                yield Event("error", job, child.number, value or _reap(child))
            # After an error CUDA may be of no more use to that process.
            if waiting and (kind == "result" or (kind == "error" and self.device == "cpu")):
                idle.append(child)
            else:
                child.end_input()


def _reap(child: Child) -> str:
    """Why a worker is dead, in one line."""
    ended, _, error = child.reap()
    return f"the worker ended with {ended}" + (f": {error}" if error else "")


# --- a shared device -------------------------------------------------------------------------------------------------
# How worker processes share a device: one CPU thread each, and on request NVIDIA's MPS on a GPU.
#
# Without MPS the kernels of different processes take turns on a GPU. An MPS server lets them run at the same time. It is started
# for the time of a bench if the machine has one and it works; otherwise the workers do without it.


_QUIET: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
# A server that started may still refuse its first client, so one is tried, with the driver alone: torch takes seconds to load.
_FIRST_CLIENT = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
raise SystemExit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSynchronize() % 201)
"""


@contextmanager
def shared_gpu(device: str, mps: bool) -> Iterator[dict[str, str]]:
    """The environment variables of worker processes. mps: inside, an MPS server runs, if this is a GPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    control = shutil.which("nvidia-cuda-mps-control")
    running = "CUDA_MPS_PIPE_DIRECTORY" in environment  # a server of the user's own
    if device == "cpu" or not mps or control is None or running:
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-mps-", ignore_cleanup_errors=True) as folder:
        shared = {**environment, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = subprocess.run([control, "-d"], env=shared, **_QUIET).returncode == 0
        try:
            yield shared if started and _serves(shared) else environment
        finally:
            if started:
                subprocess.run([control], input="quit\n", env=shared, **_QUIET)


def _serves(environment: dict[str, str]) -> bool:
    try:
        return (
            subprocess.run([sys.executable, "-c", _FIRST_CLIENT], env=environment, timeout=20, **_QUIET).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False
