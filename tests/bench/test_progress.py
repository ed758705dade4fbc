"""The bar over all runs and its time left."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from bench.finished_runs import row, small_suite
from holdfast.bench import progress as progress_module
from holdfast.bench.jobs import jobs
from holdfast.bench.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def runs():
    suite = small_suite()
    return jobs(suite, suite.tasks[:2], device="cpu")  # four of 1000 steps


def shown(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=110, height=20, soft_wrap=True, highlight=False)


def test_time_left_follows_from_the_speed_of_all_workers(clock, runs):
    bar = Progress(runs[1:], runs[:1], console=shown(False))
    assert bar.steps == 1000 and bar.remaining() is None
    bar.started(1, runs[1])
    bar.started(2, runs[2])
    bar.stepped(1, 300)
    bar.stepped(2, 200)
    clock[0] += 10
    assert bar.speed() == 50.0
    assert bar.remaining() == (4000 - 1500) / 50.0


def test_finished_and_failed_runs_are_lines(clock, runs):
    console = shown(False)
    bar = Progress(runs, [], console=console)
    bar.started(1, runs[0])
    bar.started(2, runs[1])
    clock[0] += 10
    bar.ended(1, runs[0], row("A", "gru", 1, 1.2, 1.0))
    bar.ended(2, runs[1], None, "ValueError: no")
    assert console.file.getvalue().splitlines() == [
        "1 of 4 runs  A gru seed 1  best 1.200  final 1.000  3.0 s  500 steps/s  0:30 left",
        "2 of 4 runs  A none seed 1  failed: ValueError: no  0:10 left",
    ]


def test_a_terminal_shows_a_bar_and_what_is_running(clock, runs):
    console = shown(True)
    bar = Progress(runs, [], console=console)
    bar.started(1, runs[0])
    bar.stepped(1, 250)
    clock[0] += 5
    bar.refresh()
    bar.close()
    text = console.file.getvalue()
    assert "0 of 4 runs" in text and "250 of 4k steps  50/s  0:05  1:15 left" in text
    assert "A gru seed 1  25%" in text and "━" in text


def test_a_run_that_another_worker_takes_over_is_counted_once(clock, runs):
    bar = Progress(runs, [], console=shown(False))
    bar.started(1, runs[0])
    bar.stepped(1, 900)
    bar.started(2, runs[0])
    assert bar.steps == 0


def test_quiet_prints_nothing(clock, runs):
    console = shown(True)
    bar = Progress(runs, [], quiet=True, console=console)
    bar.started(1, runs[0])
    bar.refresh()
    bar.ended(1, runs[0], row("A", "gru", 1, 1.2, 1.0))
    bar.close()
    assert console.file.getvalue() == ""


def test_a_run_that_failed_under_mps_is_a_line_and_not_counted(clock, runs):
    console = shown(False)
    bar = Progress(runs, [], console=console)
    bar.started(1, runs[0])
    bar.stepped(1, 900)
    bar.postponed(1, runs[0], "CUDA error")
    assert bar.steps == 0
    assert console.file.getvalue().splitlines() == [
        "A gru seed 1  failed under MPS, where a fault in one run ends all (CUDA error); "
        "it is retried without MPS after the others"
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_task_of_any_name_is_one_line_and_no_command(terminal, clock, runs):
    """Suites are files, which may come from anywhere."""
    named = [dataclasses.replace(run, task="\x1b]0;owned\x07\u202e\nfake row [red]") for run in runs]
    console = shown(terminal)
    bar = Progress(named, [], console=console)
    bar.started(1, named[0])
    bar.stepped(1, 300)
    bar.refresh()
    bar.ended(1, named[0], row("A", "gru", 1, 1.0, 0.5), "")
    bar.ended(2, named[1], None, "\x1b[2J\nfake row")
    bar.close()
    text = console.file.getvalue()
    assert "\\nfake row [red]" in text
    assert not any(sign in text for sign in ("\x1b]0;", "\x07", "\u202e", "\nfake", "\x1b[2J\\n"))
