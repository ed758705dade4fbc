"""Which part of a run takes how long: a clock that methods are wrapped in while it runs, and unwrapped after.

A run that is not watched pays nothing: the methods are its own again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Path = tuple[str, ...]
Place = tuple[Any, str, str]
"""An object, the name of its method, and what to call the time spent in it."""
Around = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclass
class Spent:
    """Time of a part, parts inside it included."""

    seconds: float = 0.0
    calls: int = 0


class PartClock:
    """Wall-clock time by part. A part that runs inside another is counted under it: `parts["update", "forward"]`.

    On a GPU the clock waits for it at both ends of every part, so that work is counted where it was asked for.

    >>> clock = PartClock(torch.device("cpu"))
    >>> inner = clock.around("forward", lambda: "y")
    >>> clock.around("update", lambda: inner() + inner())()
    'yy'
    >>> {path: spent.calls for path, spent in clock.parts.items()}
    {('update',): 1, ('update', 'forward'): 2}
    """

    def __init__(self, device: torch.device) -> None:
        self.parts: dict[Path, Spent] = {}
        self._open: Path = ()
        self._on_gpu = device.type == "cuda"

    def around(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **options: Any) -> Any:
            if self._on_gpu and torch.cuda.is_current_stream_capturing():
                return method(*args, **options)  # nothing runs now, and waiting is not allowed
            path = self._open = (*self._open, name)
            spent = self.parts.setdefault(path, Spent())
            self.wait()
            began = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.wait()
                spent.seconds += time.perf_counter() - began
                spent.calls += 1
                self._open = path[:-1]

        return timed

    def wait(self) -> None:
        """For what the GPU still has to do."""
        if self._on_gpu:
            torch.cuda.synchronize()


def named(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, its name in the trace of torch.profiler."""

    @functools.wraps(method)
    def annotated(*args: Any, **options: Any) -> Any:
        with torch.profiler.record_function(name):
            return method(*args, **options)

    return annotated


@contextmanager
def wrapped(places: Sequence[Place], around: Around) -> Iterator[None]:
    """Inside, each of these methods is `around(name, method)`; afterwards they are what they were."""
    before: list[tuple[Any, str, bool, Any]] = []
    try:
        for owner, attribute, name in places:
            before.append((owner, attribute, attribute in vars(owner), vars(owner).get(attribute)))
            setattr(owner, attribute, around(name, getattr(owner, attribute)))
        yield
    finally:
        for owner, attribute, own, value in reversed(before):
            setattr(owner, attribute, value) if own else delattr(owner, attribute)
