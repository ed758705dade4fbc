"""Runs jobs in several worker processes at once and yields what they answer.

On a GPU the processes share it: while one captures graphs, evaluates or saves, the others compute. With NVIDIA's MPS
their kernels also run at the same time instead of in turns. On CPUs each process has one thread.

A worker that dies is replaced, and its job is given to the new one, once. One whose run failed on a GPU is replaced too.
Under MPS a fault of one process is reported to all, as if each had made it. So a run that fails there, for whatever reason, is
tried once more when the others are over, without MPS; what it reports then is its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from holdfast.bench.jobs import Job
from holdfast.bench.shared_gpu import shared_gpu

SECONDS_TO_SAVE = 60.0
"""How long workers that are told to stop may take to save their runs."""
ATTEMPTS = 2


@dataclass
class Event:
    """What a worker reports: `kind` is "started", "steps", "result", "error" or "again" (it failed under MPS, and will be tried
    without); a tick of the clock has no job."""

    kind: str
    job: Job | None = None
    worker: int = 0
    value: Any = None


@dataclass
class _Process:
    number: int
    child: subprocess.Popen[str]
    log: IO[str]
    listener: threading.Thread
    job: Job | None = None


@dataclass
class Pool:
    """`run` trains jobs in `count` processes, in folders below `folder`. keep: leave the folders of finished runs there.
    mps: see `shared_gpu.py`. stop_after: seconds after which the runs that are not finished are saved and left."""

    count: int
    folder: Path
    device: str
    keep: bool = False
    mps: bool = False
    stop_after: float = math.inf
    uses_mps: bool = False
    """Whether the workers of `run` do: a machine may not have it."""
    _answers: queue.Queue[tuple[int, str | None]] = field(default_factory=queue.Queue)
    _processes: dict[int, _Process] = field(default_factory=dict)
    _started: int = 0
    _again: deque[Job] = field(default_factory=deque)
    """Failed under MPS."""

    def run(self, jobs: Sequence[Job], tick: float = 0.25) -> Generator[Event, None, None]:
        """Events until all jobs have a result or an error, or the time is over. Closing the iterator stops the workers; they
        save first."""
        began = time.monotonic()
        attempts = dict.fromkeys((job.id for job in jobs), 0)
        waiting, mps = deque(jobs), self.mps
        while waiting and not self._is_over(began):
            self._again = deque()
            with shared_gpu(self.device, mps) as environment:
                self.uses_mps = "CUDA_MPS_PIPE_DIRECTORY" in environment
                yield from self._train(waiting, attempts, environment, began, tick)
            waiting, mps = self._again, False

    def _train(
        self, waiting: deque[Job], attempts: dict[str, int], environment: dict[str, str], began: float, tick: float
    ) -> Iterator[Event]:
        """Until all of these jobs have ended, or the time is over."""
        try:
            for _ in range(min(self.count, len(waiting))):
                yield from self._give(self._start(environment), waiting, attempts)
            while any(process.job for process in self._processes.values()):
                if self._is_over(began):
                    self._stop()
                    yield from self._last_results()
                    return
                try:
                    number, line = self._answers.get(timeout=tick)
                except queue.Empty:
                    yield Event("tick")
                    continue
                process = self._processes[number]
                if line is None:
                    job, reason = process.job, self._bury(process)
                    if job is None:  # it ended because it was told to
                        continue
                    if attempts[job.id] < ATTEMPTS and not self.uses_mps:
                        waiting.appendleft(job)
                    else:
                        yield self._failure(job, number, reason, attempts)
                    if waiting:
                        yield from self._give(self._start(environment), waiting, attempts)
                    continue
                ((kind, value),) = json.loads(line).items()
                job = process.job
                yield (
                    self._failure(job, number, value, attempts)
                    if job and kind == "error"
                    else Event(kind, job, number, value)
                )
                if kind == "result":
                    self._remove_folder(job)
                if kind == "error" and self.device != "cpu":  # CUDA may be of no more use to that process
                    yield from self._give(process, deque(), attempts)
                    process = self._start(environment) if waiting else process
                if kind in ("result", "error"):
                    yield from self._give(process, waiting, attempts)
        finally:
            self._stop()

    def _is_over(self, began: float) -> bool:
        return time.monotonic() - began > self.stop_after

    def _failure(self, job: Job, number: int, reason: str, attempts: dict[str, int]) -> Event:
        """A run failed: for good, or to be tried again without MPS."""
        if not self.uses_mps or attempts[job.id] >= ATTEMPTS:
            return Event("error", job, number, reason)
        self._again.append(job)
        return Event("again", job, number, reason)

    def _last_results(self) -> Iterator[Event]:
        """Of runs that ended while the workers were told to stop."""
        for process in self._processes.values():
            process.listener.join()
        while not self._answers.empty():
            number, line = self._answers.get()
            job, answer = self._processes[number].job, {} if line is None else json.loads(line)
            if job is not None and "result" in answer:
                yield Event("result", job, number, answer["result"])
                self._remove_folder(job)

    def _remove_folder(self, job: Job | None) -> None:
        """Once the reader of the events has the result: a command that dies before has the run's last checkpoint."""
        if job is not None and not self.keep:
            shutil.rmtree(self.folder / job.id, ignore_errors=True)

    def _give(self, process: _Process, waiting: deque[Job], attempts: dict[str, int]) -> Iterator[Event]:
        """The next job for a worker; without one it ends."""
        process.job = waiting.popleft() if waiting else None
        assert process.child.stdin is not None
        if process.job is None:
            process.child.stdin.close()
            return
        attempts[process.job.id] += 1
        with contextlib.suppress(BrokenPipeError):  # its death is reported by the thread that reads
            process.child.stdin.write(json.dumps(process.job.to_dict()) + "\n")
            process.child.stdin.flush()
        yield Event("started", process.job, process.number)

    def _start(self, environment: dict[str, str]) -> _Process:
        self._started += 1
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (open as long as the worker lives)
        command = [sys.executable, "-m", "holdfast.bench.worker", str(self.folder)]
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process only, which tells the workers
        )
        listener = threading.Thread(target=self._listen, args=(self._started, child), daemon=True)
        process = self._processes[self._started] = _Process(self._started, child, log, listener)
        listener.start()
        return process

    def _listen(self, number: int, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if line.endswith("\n"):
                self._answers.put((number, line))
        self._answers.put((number, None))

    def _bury(self, process: _Process) -> str:
        """Why a worker is dead, in one line."""
        code = process.child.wait()
        process.log.seek(0)
        # Indented lines quote code, as warnings do.
        last = [line for line in process.log.read().splitlines() if line.strip() and not line[0].isspace()][-1:]
        process.log.close()
        process.job = None
        signed = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the worker ended with {signed}" + (f": {last[0]}" if last else "")

    def _stop(self) -> None:
        children = [process.child for process in self._processes.values()]
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                if process.child.stdin is not None:
                    process.child.stdin.close()
            if process.job is not None and process.child.poll() is None:
                process.child.terminate()  # the trainer saves and ends
        give_up = time.monotonic() + SECONDS_TO_SAVE
        for child in children:
            try:
                child.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
