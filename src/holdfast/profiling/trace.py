"""Reads a trace of torch.profiler: operations and GPU kernels by the time they took, and how busy the GPU was.

    trace = Trace.load("runs/.../trace.json.gz")
    trace.kernels()[:10]

Recording a trace is `recording.py`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Cost(NamedTuple):
    """All calls of one operation or kernel."""

    name: str
    seconds: float
    calls: int


class Trace:
    """The events of a Chrome trace; times in them are microseconds."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.events = [event for event in events if event.get("ph") == "X"]

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read a file, compressed (.gz) or not."""
        path = Path(path)
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return cls(json.loads(raw)["traceEvents"])

    def kernels(self) -> list[Cost]:
        """Kernels and copies on the GPU, the most expensive first."""
        return _totals((event["name"], event["dur"]) for event in self._gpu())

    def operations(self) -> list[Cost]:
        """Operations of torch on the CPU, without the time of operations they call; the most expensive first."""
        threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in self.events:
            if event.get("cat") == "cpu_op":
                threads[event["tid"]].append(event)
        return _totals(pair for events in threads.values() for pair in _own_times(events))

    def busy_seconds(self) -> float:
        """Seconds in which the GPU ran anything; what runs at the same time counts once."""
        busy, until = 0.0, float("-inf")
        for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in self._gpu()):
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        return busy / 1e6

    def _gpu(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("cat") in ON_THE_GPU]


def _own_times(events: list[dict[str, Any]]) -> Iterable[tuple[str, float]]:
    """Microseconds of each event without those of the events inside it; all events are of one thread."""
    open_events: list[list[Any]] = []  # [name, end, own time] from the outside in
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_events and open_events[-1][1] <= event["ts"]:
            name, _, own = open_events.pop()
            yield name, own
        if open_events:
            open_events[-1][2] -= event["dur"]
        open_events.append([event["name"], event["ts"] + event["dur"], event["dur"]])
    for name, _, own in open_events:
        yield name, own


def _totals(pairs: Iterable[tuple[str, float]]) -> list[Cost]:
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, microseconds in pairs:
        seconds[name] += microseconds / 1e6
        calls[name] += 1
    return sorted((Cost(name, seconds[name], calls[name]) for name in seconds), key=lambda cost: -cost.seconds)


def readable(kernel: str, width: int = 70) -> str:
    """A kernel's name without what the compiler adds, shortened to `width` characters.

    >>> readable("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int, float)")
    'vectorized_elementwise_kernel<4, FillFunctor<float>>'
    """
    name = re.sub(r"\bvoid |\bat::native::|\(anonymous namespace\)::|\bat_cuda_detail::", "", kernel)
    name = re.sub(r"\((?!.*>).*$", "", name.replace("> >", ">>")).strip()
    return name if len(name) <= width else name[: width - 3] + "..."
