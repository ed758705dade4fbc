"""`TraceRecorder`: a trace by torch.profiler in which spans have their names, with a bound on its size."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

LIMIT_SECONDS = 1.0
"""Of each rollout and of each update at most this much is recorded, so that a trace of long ones stays small."""
_LIMITED = ("rollout", "update")


class TraceRecorder:
    """Records from `start` to `stop`; `span` is its listener."""

    def __init__(self, device: torch.device) -> None:
        _silence_kineto()
        self._on_gpu = device.type == "cuda"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profiler = torch.profiler.profile(activities=self._activities, acc_events=True)  # without, it warns
        self._recording = False
        self._seconds = self._resumed_at = self._limit_began = 0.0

    def start(self) -> None:
        self._profiler.start()
        self._recording = True
        self._resumed_at = self._limit_began = time.perf_counter()

    def stop(self) -> float:
        """End the recording; returns the number of seconds that were recorded."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._count_seconds()
        self._profiler.stop()
        return self._seconds

    def save(self, path: Path) -> None:
        """Write a Chrome trace; compressed if the name ends in .gz."""
        self._profiler.export_chrome_trace(str(path))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if name in _LIMITED:
            self._limit_began = time.perf_counter()
            self._switch(True)
        elif self._recording and time.perf_counter() - self._limit_began > LIMIT_SECONDS:
            self._switch(False)
        with torch.profiler.record_function(name):
            yield

    def _switch(self, on: bool) -> None:
        if on == self._recording:
            return
        with _silent_stderr():  # the profiler warns each time
            self._profiler.toggle_collection_dynamic(on, self._activities)
        self._count_seconds()
        if on:
            self._recording, self._resumed_at = True, time.perf_counter()

    def _count_seconds(self) -> None:
        if self._recording:
            self._seconds += time.perf_counter() - self._resumed_at
            self._recording = False


def prepare_for_graphs() -> None:
    """Start the profiler once. Kernels of a CUDA graph appear in a trace only if that was done before the capture."""
    _silence_kineto()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True):
        pass


def _silence_kineto() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its messages would break the display


@contextmanager
def _silent_stderr() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
