"""Pictures of a sweep: how much each setting matters, and which settings the trials had.

It gets numbers and names; it knows nothing of studies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from holdfast.display.figures import new_figure, save_figure


class Axis(NamedTuple):
    """A setting: its name, its values in order if it has a few, and whether its scale is logarithmic."""

    name: str
    choices: tuple[Any, ...] = ()
    log: bool = False


def plot_importances(importances: dict[str, float], out: Path) -> Path:
    """Bars, the most important setting on top."""
    figure = new_figure((6.4, 0.9 + 0.34 * len(importances)))
    axes = figure.subplots()
    names = sorted(importances, key=lambda name: importances[name])
    bars = axes.barh(names, [importances[name] for name in names], color="#4c72b0", edgecolor="black", linewidth=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_xlabel("importance for being among the best trials (PED-ANOVA, sum 1)")
    axes.set_xlim(0, 1.12 * max(importances.values()) if any(importances.values()) else 1)
    axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, out)


def plot_parallel(axes_of: Sequence[Axis], trials: Sequence[tuple[float, Sequence[Any]]], out: Path) -> Path:
    """A line per trial through its settings to its score. trials: (score, values in the order of the axes).

    The darker and thicker the line, the better the trial; the best one is drawn last, with points.
    """
    scores = np.array([score for score, _ in trials])
    columns = [_positions(axis, [values[i] for _, values in trials]) for i, axis in enumerate(axes_of)]
    low, high = scores.min(), scores.max()
    span = high - low if high > low else 1.0
    figure = new_figure((1.2 + 1.25 * (len(axes_of) + 1), 4.4))
    axes = figure.subplots()
    rank = np.argsort(np.argsort(scores)) / max(1, len(scores) - 1)  # 0 is the worst, 1 the best
    for i in np.argsort(scores):
        heights = [*(positions[i] for positions, _ in columns), (scores[i] - low) / span]
        gray = 0.85 - 0.75 * rank[i]
        is_best = i == int(np.argmax(scores))
        style: dict[str, Any] = dict(color="#c44e52", linewidth=2.2, marker="o", zorder=3) if is_best else dict(
            color=str(gray), linewidth=0.6 + 1.2 * rank[i]
        )  # fmt: skip
        axes.plot(range(len(heights)), heights, **style)
    for i, (axis, (_, ticks)) in enumerate(zip(axes_of, columns)):
        _draw_scale(axes, i, axis.name, ticks)
    _draw_scale(axes, len(columns), "score", [(0.0, f"{low:.3g}"), (1.0, f"{high:.3g}")])
    axes.set_xlim(-0.3, len(columns) + 0.5)
    axes.set_ylim(-0.12, 1.08)
    axes.set_axis_off()
    axes.set_title("trials of the sweep: darker is better, red is the best", fontsize=10)
    return save_figure(figure, out)


def _positions(axis: Axis, values: list[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights from 0 to 1, and the ticks of the axis as (height, text)."""
    if axis.choices:
        last = max(1, len(axis.choices) - 1)
        heights = {json.dumps(choice): i / last for i, choice in enumerate(axis.choices)}
        ticks = [(heights[json.dumps(choice)], str(choice)) for choice in axis.choices]
        return [heights[json.dumps(value)] for value in values], ticks
    numbers = np.array(values, float)
    scaled = np.log(numbers) if axis.log else numbers
    low, high = scaled.min(), scaled.max()
    heights_of = (scaled - low) / (high - low if high > low else 1.0)
    return heights_of.tolist(), [(0.0, f"{numbers.min():.3g}"), (1.0, f"{numbers.max():.3g}")]


def _draw_scale(axes: Any, at: int, name: str, ticks: list[tuple[float, str]]) -> None:
    axes.plot([at, at], [0, 1], color="black", linewidth=0.8, zorder=2)
    axes.text(at, -0.08, name.replace("_", "\n"), ha="center", va="top", fontsize=8)
    for height, text in ticks:
        axes.text(
            at + 0.04, height, text, ha="left", va="center", fontsize=7, zorder=4,
            bbox=dict(facecolor="white", edgecolor="none", pad=0.5, alpha=0.8),
        )  # fmt: skip
