"""Results as Markdown: the comparison, the aggregates and the speed of every run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.bench.aggregate import STATISTICS, Estimate
from holdfast.bench.comparison import Cell, Comparison, number, signed
from holdfast.bench.results import wall_seconds
from holdfast.bench.settings import heading_of, stated
from holdfast.bench.suite import STATISTICS as MEANINGS
from holdfast.bench.suite import Suite
from holdfast.display.dashboard import clock, compact
from holdfast.shown_text import markdown as in_markdown


def markdown(suite: Suite, comparisons: Sequence[Comparison]) -> str:
    """All that there is to say, as one page of Markdown."""
    summary = "; ".join(f"{name}: {value}" for name, value in facts(comparisons).items())
    said = [in_markdown(text) for text in (suite.title or suite.name, suite.note, summary)]
    parts = [f"# {said[0]}", said[1], f"{said[2]}.", legend(suite)]
    for comparison in comparisons:
        heading, settings = heading_of(comparison.setting), stated(comparison.runs)
        parts += [f"## {in_markdown(heading)}" if heading else ""]
        parts += [f"Settings of the runs: {in_markdown(settings)}." if settings else ""]
        parts += [_comparison(comparison), _aggregates(comparison), _speed(comparison)]
    return "\n\n".join(part for part in parts if part) + "\n"


def legend(suite: Suite) -> str:
    """What the figures are and where the published ones are from."""
    other = "final return" if suite.statistic == "best" else "best mean of an update"
    lines = [
        f"Ours: {MEANINGS[suite.statistic]}; in brackets the {other}. ± is the standard deviation between seeds. "
        "▲ above, ▼ below, = within 2% of the task's range of the published figure of the same memory, or of the best one where "
        "that memory has none; ✓ the target return is reached, ✗ it is not."
    ]
    for column in suite.published.values():
        second_hand = " (second-hand)" if column.second_hand else ""
        lines.append(f"{in_markdown(column.name)}: {in_markdown(column.source)}{second_hand}.")
    return "  \n".join(lines)


def cell_text(cell: Cell) -> str:
    """The figures of a cell in one line."""
    other = cell.mean_of("final" if cell.statistic == "best" else "best")
    text = number(cell.value) + ("" if cell.deviation is None else f" ± {number(cell.deviation)}")
    if cell.difference is not None:
        text += f" {cell.difference.mark} {signed(cell.difference.value)}"
    return text + (f" ({number(other)})" if other is not None else "")


def _comparison(comparison: Comparison) -> str:
    suite, tasks = comparison.suite, comparison.tasks
    has_target = any(task.target is not None for task in tasks)
    published = [key for key in suite.published if any(key in task.published for task in tasks)]
    head = ["task", "steps", "random", *(["target"] if has_target else [])]
    head += [suite.published[key].name for key in published] + [core_name(suite, core) for core in comparison.cores]
    rows = []
    for task in tasks:
        steps = comparison.steps_of(task)
        row = [task.name + (f" ({task.note})" if task.note else ""), f"{steps:,}", number(task.low)]
        row += [number(task.target)] if has_target else []
        row += [number(task.published.get(key)) for key in published]
        found = [comparison.cells.get((task.name, core)) for core in comparison.cores]
        rows.append(row + [cell_text(cell) if cell else "" for cell in found])
    return table(head, rows)


def _aggregates(comparison: Comparison) -> str:
    parts = []
    for title, rows in comparison.aggregates:
        lines = [
            [row.name, str(row.tasks), str(row.runs), *(estimate_text(row.estimates[name]) for name in STATISTICS)]
            for row in rows
        ]
        parts.append(f"{in_markdown(title)}, normalized score:\n\n" + table(["", "tasks", "runs", *STATISTICS], lines))
    return "\n\n".join(parts)


def _speed(comparison: Comparison) -> str:
    head = ["task", *(core_name(comparison.suite, core) for core in comparison.cores)]
    rows = [
        [task.name, *(_speed_of(comparison.cells.get((task.name, core))) for core in comparison.cores)]
        for task in comparison.tasks
    ]
    return (
        "Seconds of a run (of its training), and steps per second of training, mean over seeds; runs at the same time share the "
        "device:\n\n" + table(head, rows)
    )


def _speed_of(cell: Cell | None) -> str:
    if cell is None:
        return ""
    in_all, training, speed = (cell.mean_of(name) for name in ("wall_seconds", "seconds", "steps_per_second"))
    if in_all is None or training is None or speed is None:
        return ""
    return f"{in_all:,.1f} ({training:,.1f}), {compact(speed)}/s"


def estimate_text(estimate: Estimate) -> str:
    interval = estimate.interval
    return f"{estimate.value:.3f}" + ("" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]")


def core_name(suite: Suite, core: str) -> str:
    return f"{core} (memoryless control)" if core == "none" and core in suite.control else core


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(in_markdown(cell) for cell in line) + " |" for line in lines)


# --- facts -----------------------------------------------------------------------------------------------------------
# How much was run, on what, and how long it took: the first lines of the table and of the page.


def facts(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Names and values, without those that are not known.

    The wall clock of a command ends with its last finished run: when a command is stopped, what it did after that is not in it.
    """
    rows = [row for comparison in comparisons for row in comparison.runs]
    steps = sum(int(row.get("trained_steps") or row["steps"]) for row in rows)
    seconds = wall_seconds(rows)
    found = {
        "runs": str(len(rows)),
        "tasks": str(len({row["task"] for row in rows})),
        "steps in all": compact(steps),
        "wall clock, up to the last finished run of each command": clock(seconds) if seconds else "",
        "steps per second of that time": compact(steps / seconds) if seconds else "",
        "device": ", ".join(_unique(row.get("device") for row in rows)),
        "commit": ", ".join(commit[:10] for commit in _unique(row.get("commit") for row in rows)),
    }
    return {name: value for name, value in found.items() if value}


def _unique(values: Any) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value))
