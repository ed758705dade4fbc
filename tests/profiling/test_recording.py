"""The trace of spans, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.profiling import recording
from holdfast.profiling.recording import TraceRecorder
from holdfast.profiling.trace import Trace
from holdfast.spans import listening, span


def record(path: Path) -> tuple[list[str], float]:
    """Names of the spans in the trace of a rollout of five steps and an update, and the seconds recorded."""
    recorder = TraceRecorder(torch.device("cpu"))
    with listening(recorder.span):
        recorder.start()
        with span("rollout"):
            for _ in range(5):
                with span("policy"):
                    torch.ones(4).add(1)
        with span("update"):
            torch.ones(4).mul(2)
        seconds = recorder.stop()
    recorder.save(path)
    return [event["name"] for event in Trace.load(path).events if event.get("cat") == "user_annotation"], seconds


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_every_span_by_name(tmp_path: Path, name: str):
    names, seconds = record(tmp_path / name)
    assert sorted(names) == ["policy"] * 5 + ["rollout", "update"]
    assert seconds > 0


def test_only_the_beginning_of_a_long_rollout_is_recorded_and_all_of_the_update_after_it(
    tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr(recording, "LIMIT_SECONDS", 0.0)
    names, seconds = record(tmp_path / "trace.json")
    assert names.count("policy") == 0 and {"rollout", "update"} <= set(names)
    assert seconds > 0
