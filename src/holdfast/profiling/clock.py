"""`SpanClock`: wall-clock time by span. It listens to `holdfast.spans`; how its times are shown is `report.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

SpanPath = tuple[str, ...]
"""Names of a span and of those around it, from the outside in."""


@dataclass
class Spent:
    """Time in a span, including the spans inside it."""

    seconds: float = 0.0
    calls: int = 0


class SpanClock:
    """Times spans. A span inside another is counted under it: `spent["update", "forward"]`, in order of appearance.

    On a GPU the clock synchronizes at both ends of every span, so that kernels are counted in the span that launched
    them. Inside a CUDA graph capture it does nothing: no kernel runs, and synchronizing is not allowed.

    >>> clock = SpanClock(torch.device("cpu"))
    >>> with clock.span("update"):
    ...     for _ in range(2):
    ...         with clock.span("forward"):
    ...             pass
    >>> {path: spent.calls for path, spent in clock.spent.items()}
    {('update',): 1, ('update', 'forward'): 2}
    """

    def __init__(self, device: torch.device) -> None:
        self.spent: dict[SpanPath, Spent] = {}
        self._open: SpanPath = ()
        self._on_gpu = device.type == "cuda"

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            yield
            return
        path = self._open = (*self._open, name)
        spent = self.spent.setdefault(path, Spent())
        self.synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.synchronize()
            spent.seconds += time.perf_counter() - start
            spent.calls += 1
            self._open = path[:-1]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
