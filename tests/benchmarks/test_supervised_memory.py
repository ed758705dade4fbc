"""benchmarks/supervised_memory.py: the questions have the answers they claim, and the table says what was reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import supervised_memory

    return supervised_memory


def test_what_is_right_was_seen_k_steps_before_the_question(bench):
    obs, asked, right = bench.recall(40)
    assert torch.equal(obs[asked - 40].argmax(-1), right)


def test_a_sign_is_seen_once_and_asked_for_at_the_end_of_the_corridor(bench):
    obs, asked, right = bench.sign(30)
    assert 30 <= len(obs) < 60 and asked.tolist() == [len(obs) - 1]
    assert torch.equal(obs[0].argmax(-1), right[0]) and float(obs[1:-1].max()) < 0.1


def test_a_memory_that_can_recall_gets_there(bench):
    cell = bench.updates_until_right("recall 4", "lru", 1, seed=2, rate=3e-3, limit=60)
    assert 10 <= cell["updates"] <= 60 and cell["share_right"] >= bench.RIGHT
    assert bench.table([cell]).splitlines()[-1] == f"| lru | **{cell['updates']}** |"
