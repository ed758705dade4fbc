"""Times of spans, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.profiling import clock as module
from holdfast.profiling.clock import SpanClock, Spent
from holdfast.spans import listening, span

CPU = torch.device("cpu")


def test_a_span_includes_those_inside_it(monkeypatch: Any):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    clock = SpanClock(CPU)
    with listening(clock.span), span("update"):
        now[0] += 1.0
        for seconds in (2.0, 4.0):
            with span("forward"):
                now[0] += seconds
    with clock.span("forward"):
        now[0] += 8.0
    assert clock.spent == {
        ("update",): Spent(7.0, 1),
        ("update", "forward"): Spent(6.0, 2),
        ("forward",): Spent(8.0, 1),
    }


def test_a_span_that_raises_is_closed():
    clock = SpanClock(CPU)
    with pytest.raises(ValueError), clock.span("outer"), clock.span("inner"):
        raise ValueError
    with clock.span("next"):
        pass
    assert list(clock.spent) == [("outer",), ("outer", "inner"), ("next",)]


@pytest.mark.parametrize("capturing", [False, True])
def test_on_a_gpu_the_clock_synchronizes_at_both_ends_but_never_during_a_capture(capturing: bool, monkeypatch: Any):
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("wait"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    clock = SpanClock(torch.device("cuda"))
    with clock.span("update"):
        waits.append("work")
    assert waits == (["work"] if capturing else ["wait", "work", "wait"])
    assert bool(clock.spent) != capturing
