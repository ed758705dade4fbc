"""What the report of tuning runs says of a variant: scores against the base, on the same tasks, seeds and steps."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tuning(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("tuning")


def row(variant: str, task: str, seed: int, sampled: float, **more: Any) -> dict[str, Any]:
    return dict(variant=variant, task=task, core="gru", seed=seed, total_steps=1000, sampled=sampled, **more)


ROWS = [
    row("defaults", "InvertedPendulum-P", 1, 5),
    row("defaults", "InvertedPendulum-P", 2, 5),
    row("defaults", "Reacher-P", 1, -43),
    row("white noise", "InvertedPendulum-P", 2, 1000),
    row("white noise", "InvertedPendulum-P", 1, 204),
    row("white noise", "Reacher-P", 1, -23.5),
    row("white noise", "Reacher-P", 3, -4),
]


def test_runs_are_compared_with_the_base_of_the_same_task_and_seed(tuning):
    worth = tuning.differences(ROWS, "defaults")
    assert worth == {"white noise": {"InvertedPendulum-P": pytest.approx([1.0, 0.2]), "Reacher-P": [0.5]}}
    other_steps = [{**row, "total_steps": 2000} if row["variant"] == "defaults" else row for row in ROWS]
    assert tuning.differences(other_steps, "defaults") == {}


def test_the_interval_is_of_the_mean_over_tasks(tuning):
    mean, low, high = tuning.interval({"one": [1.0, 0.2], "two": [0.5]})
    assert mean == pytest.approx(0.55) and 0.2 <= low < mean < high <= 1.0
    assert tuning.interval({"one": [0.3]}) == pytest.approx((0.3, 0.3, 0.3))


def test_the_table_shows_every_seed_and_the_number_of_pairs(tuning):
    table = tuning.report(ROWS, "defaults").splitlines()
    assert table[0] == "| variant | InvertedPendulum-P | Reacher-P | score against defaults |"
    assert table[2] == "| defaults | 5, 5 | -43 |  |"
    assert table[3].startswith("| white noise | 204, 1000 | -23.5, -4 | +0.55 [")
    assert table[3].endswith("3 pairs |")


def test_tasks_that_are_held_out_are_not_tuned_on_by_default(tuning):
    held_out = {task.name for task in tuning.SUITES[0].tasks if task.note == "held out"}
    assert len(tuning.TUNED_ON) == 10 and not held_out & set(tuning.TUNED_ON)


def test_the_training_page_has_the_table_of_the_committed_runs(tuning):
    rows = [row for row in tuning.read_results(tuning.RESULTS) if row["round"] == 13]
    page = Path(__file__).parents[2] / "docs" / "training.md"
    assert len(rows) > 20 and tuning.report(rows, "defaults") in page.read_text()
