"""What the GPU and the host do in an iteration of training: kernels by name, the GPU's idle times, the host's phases.

A callback of `hf.Trainer`; gpu_engines.py uses it. Times are per iteration. The profiler slows the host a little.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

import holdfast as hf
from holdfast.spans import listening

IDLE = 8.0  # shorter pauses, in us, are not listed


class Work(NamedTuple):
    """A kernel or copy on the GPU, in us."""

    name: str
    start: float
    end: float


def busy(works: list[Work]) -> float:
    """Time during which something ran, however many at once.

    >>> busy([Work("a", 0, 4), Work("b", 2, 5), Work("c", 7, 8)])
    6.0
    """
    total, until = 0.0, float("-inf")
    for work in sorted(works, key=lambda w: w.start):
        total += max(0, work.end - max(until, work.start))
        until = max(until, work.end)
    return total


def pauses(works: list[Work]) -> list[tuple[str, str, float]]:
    """(kernel before, kernel after, us) wherever nothing ran for longer than `IDLE`.

    >>> pauses([Work("a", 0, 4), Work("b", 2, 5), Work("c", 70, 71)])
    [('b', 'c', 65)]
    """
    found, last = [], None
    for work in sorted(works, key=lambda w: w.start):
        if last is not None and work.start - last.end > IDLE:
            found.append((last.name, work.name, work.start - last.end))
        if last is None or work.end >= last.end:
            last = work
    return found


class Timeline(hf.Callback):
    """Records `updates` iterations, after the first `after`."""

    only_watches = True

    def __init__(self, updates: int, after: int = 10) -> None:
        self._updates, self._after = updates, after
        self._works: list[Work] = []
        self._host: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._path: list[str] = []
        self._seconds = 0.0

    def on_update_end(self, trainer: Any, row: dict[str, float]) -> None:
        if trainer.update == self._after:
            torch.cuda.synchronize()
            self._open = ExitStack()
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
            self._open.enter_context(listening(self._phase))
            self._began = time.perf_counter()
        elif trainer.update == self._after + self._updates:
            torch.cuda.synchronize()
            self._seconds = time.perf_counter() - self._began
            self._open.close()
            self._profiler.stop()
            events = self._profiler.profiler.kineto_results.events()
            self._works = [
                Work(e.name(), e.start_ns() / 1e3, e.start_ns() / 1e3 + e.duration_ns() / 1e3)
                for e in events
                if e.device_type() == torch.autograd.DeviceType.CUDA
            ]

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._path.append(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            found = self._host[" / ".join(self._path)]
            found[0] += 1
            found[1] += time.perf_counter() - began
            self._path.pop()

    def result(self) -> dict[str, Any]:
        kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for work in self._works:
            kernels[work.name][0] += 1
            kernels[work.name][1] += work.end - work.start
        idle: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        for before, after, length in pauses(self._works):
            idle[before, after][0] += 1
            idle[before, after][1] += length
        n = self._updates
        return {
            "us": 1e6 * self._seconds / n, "busy_us": busy(self._works) / n,
            "kernels": [{"name": k, "count": c / n, "us": us / n} for k, (c, us) in _largest_first(kernels)],
            "idle": [{"before": a, "after": b, "count": c / n, "us": us / n} for (a, b), (c, us) in _largest_first(idle)],
            "host": [{"phase": k, "count": c / n, "us": 1e6 * s / n} for k, (c, s) in self._host.items()],
        }  # fmt: skip

    def text(self) -> str:
        found = self.result()
        lines = [f"  an iteration: {found['us']:.0f} us, the GPU is busy for {found['busy_us']:.0f}"]
        lines += [f"  {k['us']:9.1f} us {k['count']:7.1f} x {k['name'][:90]}" for k in found["kernels"][:32]]
        lines += [
            f"  idle {i['us']:7.1f} us {i['count']:5.1f} x {i['before'][:44]} -> {i['after'][:44]}"
            for i in found["idle"][:20]
        ]
        return "\n".join(lines + [f"  host {h['us']:8.1f} us {h['count']:5.1f} x {h['phase']}" for h in found["host"]])


def _largest_first(found: dict[Any, list[float]]) -> list[tuple[Any, list[float]]]:
    return sorted(found.items(), key=lambda item: -item[1][1])
