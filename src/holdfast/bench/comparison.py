"""Results next to the figures they are compared with: the contents of the table and of the page, as data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.bench import aggregate
from holdfast.bench.results import Row, latest
from holdfast.bench.settings import DEFAULT
from holdfast.bench.suite import Suite, SuiteTask

CLOSE = 0.02
"""A difference smaller than this part of the range between low and high counts as none."""
_LEVELS = (CLOSE, 0.1, 0.3)
THRESHOLDS = np.round(np.arange(-0.2, 1.1001, 0.02), 10)
"""Normalized scores at which performance profiles are drawn."""


class ReferenceDifference(NamedTuple):
    """What a return is compared with: `value` is ours minus theirs, `part` is in units of the task's range."""

    to: str
    value: float
    part: float

    @property
    def sign(self) -> int:
        """1 better, -1 worse, 0 neither; for a target: 1 reached, -1 not."""
        if self.to == "target":
            return 1 if self.value >= 0 else -1
        return 0 if abs(self.part) < CLOSE else int(math.copysign(1, self.part))

    @property
    def level(self) -> int:
        """0 to 3, by size."""
        return sum(abs(self.part) >= limit for limit in _LEVELS)

    @property
    def mark(self) -> str:
        if self.to == "target":
            return "✓" if self.sign > 0 else "✗"
        return {1: "▲", 0: "=", -1: "▼"}[self.sign]


@dataclass(frozen=True)
class Cell:
    """The runs of one core in one task."""

    runs: tuple[Row, ...]
    statistic: str  # "best" or "final"
    difference: ReferenceDifference | None

    @property
    def values(self) -> list[float]:
        """The compared statistic of every run."""
        return [value_of(row, self.statistic) for row in self.runs]

    @property
    def value(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Between seeds; None for one."""
        return statistics.stdev(self.values) if len(self.runs) > 1 else None

    def mean_of(self, name: str) -> float | None:
        found = [row[name] for row in self.runs if row.get(name) is not None]
        return statistics.fmean(found) if found else None


class AggregateRow(NamedTuple):
    """The scores of a core, or published ones, over some tasks."""

    name: str
    tasks: int
    runs: int
    estimates: dict[str, aggregate.Estimate]


class AggregateTable(NamedTuple):
    title: str
    rows: list[AggregateRow]


@dataclass(frozen=True)
class Comparison:
    """All results of a suite with one setting, by the name that `settings.py` gives it."""

    suite: Suite
    setting: str
    cores: tuple[str, ...]
    tasks: tuple[SuiteTask, ...]
    cells: dict[tuple[str, str], Cell]  # by task and core
    aggregates: list[AggregateTable]
    profiles: dict[str, aggregate.PerformanceProfile]

    @property
    def runs(self) -> list[Row]:
        return [row for cell in self.cells.values() for row in cell.runs]

    def steps_of(self, task: SuiteTask) -> int:
        return next(int(row["steps"]) for row in self.runs if row["task"] == task.name)


def value_of(row: Row, statistic: str) -> float:
    """A run in which no episode ended has no best mean; its final return counts instead."""
    value = row.get(statistic)
    return float(row["final"] if value is None else value)


def compare(suite: Suite, rows: Iterable[Row], steps: int | None = None) -> list[Comparison]:
    """One comparison per setting that has results. Runs of another number of steps are left out."""
    wanted = {task.name: suite.steps_of(task, steps) for task in suite.tasks}
    rows = [row for row in latest(rows) if wanted.get(row["task"]) == row["steps"]]
    settings = sorted({row["setting"] for row in rows}, key=lambda name: (name != DEFAULT, name))
    return [_compare(suite, [row for row in rows if row["setting"] == setting], setting) for setting in settings]


def _compare(suite: Suite, rows: list[Row], setting: str) -> Comparison:
    order = [*suite.cores, *sorted({row["core"] for row in rows} - set(suite.cores))]
    cores = tuple(core for core in order if any(row["core"] == core for row in rows))
    tasks = tuple(task for task in suite.tasks if any(row["task"] == task.name for row in rows))
    cells = {}
    for task in tasks:
        for core in cores:
            runs = tuple(
                sorted(
                    (row for row in rows if (row["task"], row["core"]) == (task.name, core)),
                    key=lambda row: row["seed"],
                )
            )
            if runs:
                cells[task.name, core] = Cell(runs, suite.statistic, _difference(suite, task, core, runs))
    groups = [(core, _scores(suite, tasks, cells, core)) for core in cores]
    groups = [(core, scores) for core, scores in groups if scores]
    return Comparison(
        suite,
        setting,
        cores,
        tasks,
        cells,
        _aggregates(suite, tasks, cells, cores),
        {core: aggregate.profile(scores, THRESHOLDS) for core, scores in groups},
    )


def _difference(suite: Suite, task: SuiteTask, core: str, runs: tuple[Row, ...]) -> ReferenceDifference | None:
    reference = suite.reference(task, core)
    if reference is None:
        return None
    name, theirs = reference
    ours = statistics.fmean(value_of(row, suite.statistic) for row in runs)
    spread = task.high - task.low if task.high is not None and task.low is not None else abs(theirs) or 1.0
    return ReferenceDifference(name, ours - theirs, (ours - theirs) / spread)


def _scores(
    suite: Suite,
    tasks: Iterable[SuiteTask],
    cells: dict[tuple[str, str], Cell],
    core: str,
    counts: Callable[[SuiteTask], bool] = lambda task: True,
) -> list[aggregate.Array]:
    """Normalized scores of a core per task, of the tasks that have a normalization."""
    found = [(task, cells[task.name, core]) for task in tasks if (task.name, core) in cells and counts(task)]
    return [
        np.array([score for value in cell.values if (score := task.score(value)) is not None])
        for task, cell in found
        if task.low is not None
    ]


def _aggregates(
    suite: Suite, tasks: tuple[SuiteTask, ...], cells: dict[tuple[str, str], Cell], cores: tuple[str, ...]
) -> list[AggregateTable]:
    """Over all tasks, and over the tasks of each published column with that column as a row."""
    everywhere = [_row(core, _scores(suite, tasks, cells, core)) for core in cores]
    tables = [AggregateTable("All tasks", [row for row in everywhere if row is not None])]
    for key, column in suite.published.items():
        scored = [task for task in tasks if key in task.published and task.low is not None]
        rows = [_row(core, _scores(suite, scored, cells, core)) for core in cores]
        theirs = [np.array([task.score(task.published[key])], dtype=float) for task in scored]
        if scored:
            both = [row for row in (*rows, _row(column.name, theirs)) if row is not None]
            tables.append(AggregateTable(f"Tasks with a figure of {column.name}", both))
    return [table for table in tables if table.rows]


def _row(name: str, scores: list[aggregate.Array]) -> AggregateRow | None:
    if not scores:
        return None
    estimates = {title: aggregate.estimate(scores, statistic) for title, statistic in aggregate.STATISTICS.items()}
    return AggregateRow(name, len(scores), sum(map(len, scores)), estimates)


def number(value: float | None) -> str:
    """A return for people.

    >>> number(0.99951), number(-217.94), number(475.0), number(None)
    ('1.000', '-217.9', '475.0', '')
    """
    if value is None or math.isnan(value):
        return ""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def signed(value: float) -> str:
    """
    >>> signed(0.25), signed(-12.0), signed(-0.0001)
    ('+0.250', '−12.0', '0.000')
    """
    text = number(abs(value))
    return text if not float(text.replace(",", "")) else ("+" if value > 0 else "−") + text
