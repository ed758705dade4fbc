"""benchmarks/memory_span.py: every cell has a valid config, and the table says what was reached."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import envs

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import memory_span

    return memory_span


def test_every_task_can_be_made_and_is_long_enough_for_its_span(bench):
    for task, spans in bench.SPANS.items():
        for span in spans:
            config = bench.config_of(task, "window", span, seed=1, max_steps=1000)
            env = envs.make(config.env, 2, env_kwargs=config.env_kwargs)
            assert env.num_envs == 2 and config.num_steps > span
            assert config.memory_span >= span


def test_a_window_is_as_long_as_the_span(bench):
    config = bench.config_of("recall", "window", 16, seed=1, max_steps=1000)
    env = envs.make(config.env, 2, env_kwargs=config.env_kwargs)
    policy = hf.ActorCritic(
        env.single_observation_space, env.single_action_space, config.core, 8, memory_span=config.memory_span
    )
    assert policy.core.core.window == 16


def test_the_table_says_what_was_reached_and_what_was_not(bench):
    def cell(core, span, seed, steps, mean_return):
        return {"task": "recall", "core": core, "span": span, "seed": seed, "steps_to_threshold": steps,
                "steps": 500_000, "mean_return": mean_return}  # fmt: skip

    cells = [
        cell("window", 4, 1, 100_000, 0.99),
        cell("window", 4, 2, 140_000, 0.98),
        cell("window", 8, 1, 300_000, 0.97),
        cell("window", 8, 2, None, 0.80),
        cell("gru", 8, 1, None, -0.4),
    ]
    assert bench.table(cells).splitlines() == [
        "| recall | 4 | 8 |",
        "|---|---|---|",
        "| gru |  | -0.40 at 0.50M |",
        "| window | **0.12M** | **0.30M** (1 of 2) |",
    ]


def row_of(bench, cell, steps_to_threshold, max_steps):
    return {**cell._asdict(), "steps_to_threshold": steps_to_threshold, "max_steps": max_steps, "steps": max_steps,
            "mean_return": 0.0}  # fmt: skip


def run(bench, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["memory_span.py", *map(str, arguments)])
    bench.main()


def test_what_is_done_is_not_run_again_and_the_longest_cells_come_first(bench, monkeypatch, tmp_path, capsys):
    out = tmp_path / "cells.jsonl"
    reached, ended, too_short = (bench.Cell("recall", core, 16, 1) for core in ("lru", "gru", "lstm"))
    rows = [
        row_of(bench, reached, 30_000, 300_000),
        row_of(bench, ended, None, 300_000),
        row_of(bench, ended, None, bench.step_limit(ended)),  # again, with more steps: the last line counts
        row_of(bench, too_short, None, 300_000),
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))

    run(bench, monkeypatch, "--task", "recall", "--spans", 4, 16, "--cores", "lru", "gru", "lstm", "--seeds", 1,
        "--list", "--out", out)  # fmt: skip

    said = [line.rsplit(":", 1)[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "recall 4, lru, seed 1",
        "recall 16, lstm, seed 1",
        "recall 4, lstm, seed 1",
        "recall 4, gru, seed 1",
    ]


def test_the_whole_grid_has_every_core_and_leaves_out_what_costs_too_much(bench, monkeypatch, tmp_path, capsys):
    run(bench, monkeypatch, "--seeds", 11, "--list", "--out", tmp_path / "cells.jsonl")
    cells = capsys.readouterr().out.splitlines()
    assert len(cells) == len(set(cells)) == 7 * 4 + 2 * 5 + 2 * 4 + 3 * 3


def test_a_cell_is_one_line_and_none_if_the_time_is_over(bench, monkeypatch, tmp_path):
    out = tmp_path / "cells.jsonl"
    options = ("--task", "recall", "--spans", 4, "--cores", "gru", "--max-steps", 1, "--out", out)
    with pytest.raises(SystemExit, match="no cell is done yet"):
        run(bench, monkeypatch, *options, "--seeds", 1, 2, "--jobs", 2, "--seconds", 0)
    run(bench, monkeypatch, *options, "--seeds", 2)
    (row,) = bench.finished(out).values()
    assert (row["seed"], row["steps"]) == (2, 64 * 128)

    before = out.read_text()
    run(bench, monkeypatch, *options, "--seeds", 2)
    assert out.read_text() == before and out.with_suffix(".png").exists()
