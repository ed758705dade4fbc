"""The table of the training page is the one that the committed runs make."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from structure.source_tree import ROOT

BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "out_of_the_box.py"))


def row(core: str, seed: int, sampled: float, deterministic: float = 500) -> dict[str, Any]:
    return dict(variant="", task="CartPole", core=core, seed=seed, sampled=sampled, deterministic=deterministic)


def test_the_training_page_has_the_table_of_the_committed_runs():
    rows = BENCHMARK["read_results"](BENCHMARK["RESULTS"])
    assert BENCHMARK["report"](rows) in (ROOT / "docs" / "training.md").read_text()


def test_every_task_has_five_seeds_of_each_core_and_a_control():
    groups = BENCHMARK["in_groups"](BENCHMARK["read_results"](BENCHMARK["RESULTS"]))
    for name, task in BENCHMARK["TASKS"].items():
        for core in task.cores:
            assert sorted(run["seed"] for run in groups["", name, core]) == [101, 102, 103, 104, 105], (name, core)
        assert name == "Pendulum 300k" or groups["", name, "none"], name


@pytest.mark.parametrize("order", [(101, 102), (102, 101)])
def test_a_row_has_its_mean_every_seed_in_order_and_the_runs_without_memory(order: tuple[int, int]):
    runs = [row("gru", seed, {101: 400.0, 102: 500.0}[seed]) for seed in order]
    table = BENCHMARK["report"]([*runs, row("none", 101, 50.0), row("none", 102, 52.0)])
    assert table.splitlines()[2:] == ["| CartPole | GRU | 100,000 | 475 | 450 | 400, 500 | 500 | 51 | 22 | 500 |"]


def test_only_the_table_of_a_page_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BENCHMARK['HEADER']}\n|---|\n| old |\n\nafter\n\nend\n")
    BENCHMARK["write_into"](page, f"{BENCHMARK['HEADER']}\n| new |")
    assert page.read_text() == f"before\n\n{BENCHMARK['HEADER']}\n| new |\n\nafter\n\nend\n"
