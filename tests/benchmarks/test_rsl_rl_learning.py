"""How the comparison with rsl_rl decides. The runs themselves are in `make test-learning`."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from statistics import variance

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import rsl_rl_learning

    return rsl_rl_learning


def test_the_bound_is_students(script):
    theirs = [0.8 + 0.01 * (i % 7) for i in range(21)]
    ours = [x + 0.1 for x in theirs]
    error = sqrt(2 * variance(theirs) / 21)
    assert script.lower_bound(ours, theirs) == pytest.approx(0.1 - 1.6839 * error, abs=1e-5)  # 40 degrees of freedom


@pytest.mark.parametrize(("lower_by", "as_well"), [(0.0, True), (0.02, False)])
def test_the_verdict_is_over_seeds_that_both_have(script, tmp_path, lower_by, as_well):
    rows = [{"ours": True, "seed": s, "reward": 0.87 + 0.001 * (s % 5) - lower_by} for s in range(20)]
    rows += [{"ours": False, "seed": s, "reward": 0.87 + 0.001 * (s % 5)} for s in range(20)]
    rows += [{"ours": True, "seed": 20, "reward": 0.0}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = script.main(["--verdict", "--output", str(path)])
    assert found["seeds"] == 20 and found["as_well"] is as_well and found["ours"]["lowest"] > 0.8
