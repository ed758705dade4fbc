"""Named spans around the phases of a run, so that a profiler can time them. This module times nothing itself.

    with span("rollout"):
        ...

An unused span costs well under a microsecond. To measure it:

    python -m timeit -s "from holdfast.spans import span" "with span('x'): pass"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

Listener = Callable[[str], AbstractContextManager[Any]]
"""Makes a context manager from the name of a span."""

_NOTHING: AbstractContextManager[Any] = nullcontext()
_listeners: dict[int, Listener] = {}  # by thread: runs in other threads are not measured


def span(name: str) -> AbstractContextManager[Any]:
    """A phase of that name; phases nest."""
    if not _listeners:
        return _NOTHING
    listener = _listeners.get(get_ident())
    return _NOTHING if listener is None else listener(name)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, every span of this thread is the listener's. The innermost listener wins.

    >>> with listening(lambda name: nullcontext(print(name))), span("rollout"), span("policy"):
    ...     pass
    rollout
    policy
    """
    thread = get_ident()
    before = _listeners.get(thread)
    _listeners[thread] = listener
    try:
        yield
    finally:
        del _listeners[thread]
        if before is not None:
            _listeners[thread] = before
