"""benchmarks/learning.py: a preset has figures of fresh seeds with its present settings, and the page shows them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from holdfast.config import PRESETS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "learning.py"


@pytest.fixture
def bench(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("learning_benchmark", SCRIPT)  # tests/learning has the plain name
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row_of(run: Any, mean_return: float, steps_to_threshold: int | None = None) -> dict[str, Any]:
    return {
        **run._asdict(), "mean_return": mean_return, "steps": 1_000_000, "steps_to_threshold": steps_to_threshold,
        "settings": PRESETS[run.preset],
    }  # fmt: skip


def test_every_preset_has_a_goal(bench):
    assert list(bench.GOALS) == list(PRESETS)


def test_the_goal_is_gymnasiums_own_where_it_has_one(bench):
    own = {name: gymnasium.spec(settings["env"]).reward_threshold
           for name, settings in PRESETS.items() if not settings["env"].startswith("holdfast/")}  # fmt: skip
    assert {name: bench.GOALS[name].solved_at for name, threshold in own.items() if threshold is not None} == {
        name: threshold for name, threshold in own.items() if threshold is not None
    }
    assert len(own) == 10


def test_every_preset_has_figures_of_fresh_seeds_with_the_settings_it_has(bench):
    rows = {run: row for run, row in bench.finished(bench.RESULTS).items() if run.core != "none"}
    seeds = Counter(run.preset for run in rows)
    assert all(seeds[name] >= 10 for name in PRESETS), "run benchmarks/learning.py --only PRESET, then --report"
    solved = Counter(run.preset for run, row in rows.items() if row["mean_return"] >= bench.GOALS[run.preset].solved_at)
    assert all(solved[name] >= 9 for name in PRESETS)


def test_the_rows_are_of_the_presets_and_seeds_that_the_table_is_about(bench):
    rows = bench.finished(bench.RESULTS)
    assert len(rows) == len(bench.RESULTS.read_text().splitlines()), "rows of other settings, or twice the same run"
    assert set(rows) <= set(bench.wanted()), "rows of other seeds"
    assert all(row["solved_at"] == bench.GOALS[run.preset].solved_at for run, row in rows.items())


def test_the_page_shows_what_was_measured(bench):
    page = bench.PAGE.read_text()
    assert page == bench.with_table(page, bench.table(bench.finished(bench.RESULTS))), "run it with --report"


def test_a_line_of_the_table_counts_the_seeds_that_are_solved(bench):
    run = bench.Run("cartpole-masked", "gru", 201)
    rows = [
        row_of(run._replace(seed=202), 474.0, None),
        row_of(run, 475.0, 40_000),
        row_of(run._replace(seed=203), 500.0, 60_000),
        row_of(run._replace(core="none"), 40.0),
        row_of(run._replace(core="none", seed=202), 50.0),
    ]
    found = bench.table({bench.Run(row["preset"], row["core"], row["seed"]): row for row in rows}).splitlines()
    assert len(found) == 2 + len(PRESETS)
    assert found[2 + list(PRESETS).index("cartpole-masked")] == (
        "| cartpole-masked | gru | 475 | 2 of 3 | 483.0 | 474.0 | 475.0, 474.0, 500.0 | 1,000,000 | 60,000 | 45.0 |"
    )
    assert found[2 + list(PRESETS).index("cartpole")].startswith("| cartpole | gru | 475 | not run |")


def test_rows_of_other_settings_do_not_count(bench, tmp_path):
    run = bench.Run("t-maze", "lstm", 201)
    other = {**row_of(run._replace(seed=202), 1.0), "settings": {**PRESETS["t-maze"], "total_steps": 1}}
    gone = {**row_of(run, 1.0), "preset": "no-such-preset"}
    output = tmp_path / "rows.jsonl"
    output.write_text("".join(json.dumps(row) + "\n" for row in (row_of(run, 0.1), other, gone, row_of(run, 0.9))))
    assert {run: row["mean_return"] for run, row in bench.finished(output).items()} == {run: 0.9}


def test_every_preset_gets_its_first_seed_before_any_gets_its_second(bench):
    runs = [run for run in bench.wanted() if run.core != "none"]
    first, second = runs[: len(PRESETS)], runs[len(PRESETS) : 2 * len(PRESETS)]
    assert {run.preset: run.seed for run in first} == {name: goal.first_seed for name, goal in bench.GOALS.items()}
    assert [run.seed for run in second] == [run.seed + 1 for run in first]
    costs = [bench.GOALS[run.preset].seconds for run in first]
    assert costs == sorted(costs) and len(set(runs)) == 10 * len(PRESETS)


def test_a_run_is_started_only_if_it_fits_into_the_time_that_is_left(bench, tmp_path):
    runs = [bench.Run("lunar-lander", "gru", 201), bench.Run("repeat-previous-easy", "lstm", 201)]
    queue = bench.Queue(list(runs), tmp_path / "rows.jsonl", stop_after=100)
    assert (queue.take(), queue.take(), queue.runs) == (runs[1], None, runs[:1])


def test_a_run_becomes_a_row_and_is_not_in_the_list_again(bench, tmp_path, monkeypatch, capsys):
    def main(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["learning.py", "--only", "repeat-previous-easy", *options])
        bench.main()

    output = tmp_path / "rows.jsonl"
    monkeypatch.setitem(PRESETS, "repeat-previous-easy", {**PRESETS["repeat-previous-easy"], "total_steps": 9000})
    run = bench.Run("repeat-previous-easy", "none", 7)
    row = bench.train(run)
    assert row["steps"] == 3 * 64 * 64 and len(row["curve"]) == 3 and row["settings"]["total_steps"] == 9000
    assert -0.7 < row["mean_return"] < -0.3 and row["steps_to_threshold"] is None
    rows = [{**row, "core": core, "seed": seed} for core in ("lstm", "none") for seed in (201, 202)]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main("--seeds", "201", "202", "203", "210", "--list", "--output", str(output))
    assert [line.rsplit(":", 1)[0] for line in capsys.readouterr().out.splitlines()] == [
        "repeat-previous-easy, lstm, seed 203",
        "repeat-previous-easy, none, seed 203",
        "repeat-previous-easy, lstm, seed 210",
    ]
