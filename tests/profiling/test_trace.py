"""What a trace says, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.profiling.report import costs_table
from holdfast.profiling.trace import Cost, Trace


def event(cat: str, name: str, begin: float, length: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "tid": tid}


def test_the_gpu_is_busy_while_anything_runs_and_overlaps_count_once():
    trace = Trace(
        [
            event("kernel", "a", 0, 1e6),
            event("kernel", "b", 500_000, 1e6),  # 0.5 s of it at the same time as a
            event("gpu_memcpy", "copy", 2e6, 1e6),
            event("kernel", "a", 2.2e6, 0.1e6),  # inside the copy
            event("gpu_user_annotation", "update", 0, 9e6),
            event("cpu_op", "launch", 0, 9e6),
        ]
    )
    assert trace.busy_seconds() == pytest.approx(2.5)
    assert trace.kernels() == [Cost("a", pytest.approx(1.1), 2), Cost("b", 1.0, 1), Cost("copy", 1.0, 1)]
    lines = costs_table(trace, on_gpu=True, updates=2, seconds=5.0)
    assert lines[0].startswith("the GPU was busy for 50% of 5,000.0 ms (2 traced updates)")


def test_an_operation_is_counted_without_those_it_calls():
    trace = Trace(
        [
            event("cpu_op", "linear", 0, 10),
            event("cpu_op", "mm", 2, 5),
            event("cpu_op", "copy", 3, 1),
            event("cpu_op", "mm", 20, 4),
            event("cpu_op", "linear", 1, 7, tid=2),  # another thread: not inside the first
        ]
    )
    found = {cost.name: (round(1e6 * cost.seconds), cost.calls) for cost in trace.operations()}
    assert found == {"linear": (5 + 7, 2), "mm": (4 + 4, 2), "copy": (1, 1)}
