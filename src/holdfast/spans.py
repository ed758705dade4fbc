"""Named spans around the phases of a run, so that a profiler can time them. Nearly free while nobody listens.

    with span("rollout"):
        ...

A listener is a function from a name to a context manager. There is at most one in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Listener = Callable[[str], AbstractContextManager[Any]]

_NOTHING: AbstractContextManager[Any] = nullcontext()
_listener: Listener | None = None


def span(name: str) -> AbstractContextManager[Any]:
    """A phase of that name; phases nest."""
    return _NOTHING if _listener is None else _listener(name)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, every span is also the listener's."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
