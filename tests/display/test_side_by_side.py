"""Several runs at once: a table in a terminal, a few plain lines elsewhere, from files that other processes write."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.config import TrainConfig
from holdfast.display.side_by_side import PLAIN_LINES, SideBySide, last_row

COLUMNS = ("update", "steps", "rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps", "time/elapsed")


def configs(folder: Path, **settings: Any) -> list[TrainConfig]:
    return [
        TrainConfig(seed=seed, run_dir=str(folder / str(seed)), num_envs=4, num_steps=8, total_steps=3200, **settings)
        for seed in (3, 5)
    ]


def write(run: Path, updates: int, torn: str = "") -> None:
    run.mkdir(exist_ok=True)
    rows = [[n, 32 * n, n / 100, 51, 1000, n * 0.5] for n in range(1, updates + 1)]
    lines = [COLUMNS, *rows]
    (run / "progress.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines) + torn)


def test_the_last_row_is_the_last_whole_one(tmp_path: Path):
    assert last_row(tmp_path) == {}
    write(tmp_path, 0)
    assert last_row(tmp_path) == {}
    write(tmp_path, 2000, torn="2001,3")
    assert last_row(tmp_path) == {
        "update": 2000, "steps": 64000, "rollout/ep_rew_mean": 20.0, "rollout/ep_len_mean": 51, "time/fps": 1000,
        "time/elapsed": 1000.0,
    }  # fmt: skip
    (tmp_path / "progress.csv").write_text("update,steps\nhalf,a row\n")
    assert last_row(tmp_path) == {}


def test_without_a_terminal_each_run_is_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    runs = configs(tmp_path)
    shown = SideBySide(runs, console=console)
    for update in range(1, 101):
        for config in runs:
            write(config.folder, update)
            shown.refresh()
    shown.ended(runs[0], "return 1.000")
    shown.refresh()
    shown.close()
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2 * PLAIN_LINES
    assert lines[0].startswith("seed 3  update   1/100     32 steps  return  0.010") and lines[1].startswith("seed 5  ")
    assert lines[-1].endswith("left 0:04"), "at 91 of 100 updates, half a second each"
    assert capsys.readouterr().out == "seed 3  return 1.000\n"


def test_in_a_terminal_a_table_has_a_line_per_seed(tmp_path: Path):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, highlight=False, _environ={"TERM": "xterm"})
    runs = configs(tmp_path)
    shown = SideBySide(runs, console=console)
    write(runs[0].folder, 50)
    shown.refresh()
    picture = console.file.getvalue()
    assert "return" in picture and "0.500" in picture and "0:25" in picture and "waiting" in picture
    write(runs[0].folder, 100)
    shown.ended(runs[0], "return 1.000 [final]")
    shown.refresh()
    shown.close()
    assert "seed 3  return 1.000 [final]" in console.file.getvalue() and "done" in console.file.getvalue()


def test_quiet_shows_only_what_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = configs(tmp_path, quiet=True)
    shown = SideBySide(runs)
    write(runs[0].folder, 50)
    shown.refresh()
    shown.ended(runs[1], "out of memory")
    shown.close()
    assert capsys.readouterr().out == "seed 5  out of memory\n"
