"""How old and new are compared: ratios within a round, medians and intervals over rounds, both trees in turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import old_and_new

    return old_and_new


def test_a_ratio_is_the_geometric_mean_over_the_cases(program: Any) -> None:
    times = {"old": {"a": 1.0, "b": 2.0}, "new": {"a": 2.0, "b": 1.0}, "old again": {"a": 4.0, "b": 8.0}}
    assert program.ratio(times, "new") == pytest.approx(1.0)  # sqrt(2 x 1/2)
    assert program.ratio(times, "old again") == pytest.approx(4.0)


def test_the_interval_lies_around_the_median_and_is_the_same_each_time(program: Any) -> None:
    ratios = [0.97, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.03, 1.3]
    low, high = program.interval(ratios)
    assert 0.97 <= low < 1.0 < high <= 1.03  # one slow round does not move it
    assert program.interval(ratios) == [low, high]
    assert program.interval([1.0]) == [1.0, 1.0]


def test_a_tree_that_is_slower_shows_and_results_of_earlier_measurements_stay(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tree in ("before", "after"):
        (tmp_path / tree / "src" / "holdfast").mkdir(parents=True)
        (tmp_path / tree / "src" / "holdfast" / "__init__.py").touch()
    calls = []

    def measured(tree: Path, name: str, seed: int, quick: bool) -> dict[str, float]:
        calls.append((tree.name, seed))
        return {"case": 1.2 if tree.name == "after" else 1.0}

    out = tmp_path / "results.json"
    out.write_text(json.dumps({"measurements": {"steps": {"kept": True}}}))
    monkeypatch.setattr(program, "in_a_process", measured)
    command = ["old_and_new.py", "--old", str(tmp_path / "before"), "--new", str(tmp_path / "after")]
    monkeypatch.setattr(sys, "argv", [*command, "--only", "runner", "--pairs", "6", "--output", str(out)])
    program.main()
    results = json.loads(out.read_text())
    assert results["measurements"]["runner"]["new/old"]["median"] == pytest.approx(1.2)
    assert results["measurements"]["runner"]["old/old"]["interval"] == [1.0, 1.0]
    assert results["measurements"]["steps"] == {"kept": True}
    assert str(tmp_path) not in out.read_text()
    assert "1.200" in capsys.readouterr().out
    # Every round has the same seed for all three, and the six rounds are in six different orders.
    by_round = [calls[i : i + 3] for i in range(0, 18, 3)]
    assert all(len({seed for _, seed in part}) == 1 for part in by_round)
    assert sorted([name for name, _ in part].index("after") for part in by_round) == [0, 0, 1, 1, 2, 2]


def test_a_folder_without_the_package_is_refused(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["old_and_new.py", "--old", str(tmp_path), "--new", str(ROOT)])
    with pytest.raises(SystemExit):
        program.main()
    assert "has no src/holdfast" in capsys.readouterr().err
