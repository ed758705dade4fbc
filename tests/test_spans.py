"""Spans: free without a listener, heard by the innermost one, and only in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from holdfast.spans import listening, span


class Heard:
    """A listener that writes down the beginning and end of each span."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.events.append(f"begin {name}")
        try:
            yield
        finally:
            self.events.append(f"end {name}")


def test_a_span_that_nobody_hears_is_always_the_same_object():
    assert span("rollout") is span("update")


def test_a_listener_hears_beginnings_and_ends_also_after_an_error():
    heard = Heard()
    with listening(heard):
        with span("rollout"), span("policy"):
            pass
        with pytest.raises(ZeroDivisionError), span("update"):
            raise ZeroDivisionError
    with span("log"):
        pass
    assert heard.events == [
        "begin rollout", "begin policy", "end policy", "end rollout", "begin update", "end update"
    ]  # fmt: skip


def test_the_innermost_listener_hears_and_the_outer_one_returns():
    outer, inner = Heard(), Heard()
    with listening(outer):
        with listening(inner), span("a"):
            pass
        with span("b"):
            pass
    assert inner.events == ["begin a", "end a"] and outer.events == ["begin b", "end b"]
    assert span("c") is span("d")


def test_a_span_that_was_open_before_or_stays_open_after_listening_does_no_harm():
    heard = Heard()
    before = span("before")
    before.__enter__()
    with listening(heard):
        before.__exit__(None, None, None)
        after = span("after")
        after.__enter__()
    after.__exit__(None, None, None)
    assert heard.events == ["begin after", "end after"]


def test_a_run_in_another_thread_is_not_heard():
    here, there = Heard(), Heard()

    def other_run() -> None:
        with span("unheard"):
            pass
        with listening(there), span("there"):
            pass

    with listening(here):
        thread = threading.Thread(target=other_run)
        thread.start()
        thread.join()
        with span("here"):
            pass
    assert here.events == ["begin here", "end here"] and there.events == ["begin there", "end there"]


def test_spans_can_be_compiled():
    def double(x: torch.Tensor) -> torch.Tensor:
        with span("policy"):
            return 2 * x

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
