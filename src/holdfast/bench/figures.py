"""Figures of a bench for papers and talks: learning curves and scores. The name of a file says its format: PNG, PDF, SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from holdfast.bench import results
from holdfast.bench.comparison import Comparison
from holdfast.display.figures import new_figure, save_figure
from holdfast.display.plot import Aggregate, Run, draw

FORMATS = ("png", "pdf")
_COLORS, _DASHES = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#8c6d1f", "#56b4e9"), ("-", "--", "-.", ":")


def plot_results(
    files: Sequence[Path], out: Path, group: str | Sequence[str] = "auto", aggregate: Aggregate = "mean"
) -> Path:
    """Learning curves of the runs in `results.jsonl` files: a panel per task, a line per core and setting."""
    return _curves([row for file in files for row in results.read(file)[0]], out, group, aggregate)


def write_figures(rows: Iterable[results.Row], comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Curves of all runs, and scores of each setting if the suite's tasks have a range."""
    rows = list(rows)
    written = [_curves(rows, folder / f"curves.{kind}") for kind in FORMATS]
    for number, comparison in enumerate(comparison for comparison in comparisons if comparison.profiles):
        name = f"scores-{number + 1}" if number else "scores"
        written += [_scores(comparison, folder / f"{name}.{kind}") for kind in FORMATS]
    return written


def _curves(
    rows: Iterable[results.Row], out: Path, group: str | Sequence[str] = "auto", aggregate: Aggregate = "mean"
) -> Path:
    runs = []
    for row in results.latest(rows):
        if row.get("curve"):
            steps, returns = np.array(row["curve"], dtype=float).T
            known = {"env": row["task"], **{name: row[name] for name in ("core", "setting", "seed")}}
            runs.append(Run(Path(row["id"]), known, steps, returns))
    if not runs:
        raise ValueError("there is no finished run with a curve in these results")
    return draw(runs, out, group=group, aggregate=aggregate)


def _scores(comparison: Comparison, out: Path) -> Path:
    """Interquartile means with their intervals, and the share of runs above each score."""
    table = comparison.aggregates[0]
    figure = new_figure((10.0, 1.8 + max(1.8, 0.35 * len(table.rows))))
    left, right = figure.subplots(1, 2)
    for place, row in enumerate(reversed(table.rows)):
        value, interval = row.estimates["interquartile mean"]
        left.plot(value, place, "o", color="black")
        if interval is not None:
            left.plot(interval, (place, place), color="black", marker="|")
    left.set_yticks(range(len(table.rows)), [row.name for row in reversed(table.rows)])
    left.set_ylim(-0.5, len(table.rows) - 0.5)
    left.set_xlim(min(0.0, left.get_xlim()[0]), max(1.0, left.get_xlim()[1]))
    one_seed = all(row.estimates["interquartile mean"].interval is None for row in table.rows)
    left.set_xlabel(f"interquartile mean of the scores{'' if one_seed else ', 95% interval'}")
    for number, (core, profile) in enumerate(comparison.profiles.items()):
        color, dashes = _COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)]
        right.fill_between(profile.thresholds, profile.low, profile.high, color=color, alpha=0.15, linewidth=0)
        right.plot(profile.thresholds, profile.share, color=color, linestyle=dashes, label=core)
    right.set_xlabel("score")
    right.set_ylabel("share of runs above it")
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{comparison.suite.title}, {table.title}", fontsize=11)
    return save_figure(figure, out)
