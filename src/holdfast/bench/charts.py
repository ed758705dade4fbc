"""Charts of a bench as inline SVG: learning curves, intervals, performance profiles. Colors are variables of the page's style.

Every series has a color and a dash pattern of its own, so that charts can be read without color.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from holdfast.bench.aggregate import Array, Estimate, PerformanceProfile
from holdfast.bench.comparison import Cell, number
from holdfast.bench.suite import SuiteTask
from holdfast.display.dashboard import compact

NUM_COLORS = 8
_DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2", "1.5 4", "12 3", "6 2 2 2 2 2")
Point = tuple[float, float]


def stroke(index: int) -> str:
    """The look of series number `index`."""
    dash = _DASHES[index % len(_DASHES)]
    return f'style="stroke:var(--c{index % NUM_COLORS})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def key(names: Sequence[str]) -> str:
    """Names of series next to samples of their lines."""
    samples = (
        f'<span class="key"><svg width="34" height="10" aria-hidden="true"><path class="line" d="M1 5H33" {stroke(i)}/></svg> '
        f"{escape(name)}</span>"
        for i, name in enumerate(names)
    )
    return f'<p class="keys">{"".join(samples)}</p>'


class _Frame:
    """Axes: maps data to a picture of `width` x `height` and draws the frame with labels at the ends and at `marks`."""

    def __init__(self, width: int, height: int, x: Point, y: Point, left: int = 46, right: int = 10) -> None:
        self.width, self.height, self.left, self.right, self.bottom, self.top = width, height, left, right, 20, 8
        self.x_range, self.y_range = _range(x), _range(y)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.bottom - self.top)

    def path(self, points: Sequence[Point]) -> str:
        return "".join(f"{'L' if i else 'M'}{self.x(a):.1f} {self.y(b):.1f}" for i, (a, b) in enumerate(points))

    def band(self, xs: Array, low: Array, high: Array) -> str:
        edge = [*zip(xs, high), *zip(xs[::-1], low[::-1])]
        return self.path([(float(a), float(b)) for a, b in edge]) + "Z"

    def axes(self, x_marks: Mapping[float, str], y_marks: Mapping[float, str]) -> str:
        end, base = self.width - self.right, self.height - self.bottom
        parts = [f'<path class="axis" d="M{self.left} {self.top}V{base}H{end}"/>']
        for value, text in y_marks.items():
            at = self.y(value)
            parts.append(f'<path class="grid" d="M{self.left} {at:.1f}H{end}"/>')
            parts.append(f'<text x="{self.left - 5}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
        for value, text in x_marks.items():
            at = self.x(value)
            anchor = "end" if at > end - 20 else "start" if at < self.left + 12 else "middle"
            parts.append(f'<text x="{at:.1f}" y="{self.height - 5}" text-anchor="{anchor}">{escape(text)}</text>')
        return "".join(parts)

    def svg(self, inside: str, label: str) -> str:
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" role="img" '
            f'aria-label="{escape(label)}">{inside}</svg>'
        )


def learning_curves(task: SuiteTask, cells: Mapping[int, Cell], lines: Mapping[str, float]) -> str:
    """Curves of one task. cells: by the number of the series; lines: published figures and the target, by name."""
    curves = {index: curve for index, cell in cells.items() if (curve := _mean_curve(cell)) is not None}
    values = [v for _, mean, low, high in curves.values() for v in (mean.min(), low.min(), high.max())]
    values += [v for v in (task.low, *lines.values()) if v is not None]
    steps = max((float(xs[-1]) for xs, *_ in curves.values()), default=1.0)
    frame = _Frame(300, 160, (0.0, steps), (min(values, default=0.0), max(values, default=1.0)))
    bottom, top = frame.y_range
    parts = [frame.axes({0.0: "0", steps: compact(steps)}, {bottom: _tick(bottom), top: _tick(top)})]
    for name, value in lines.items():
        at = frame.y(value)
        parts.append(
            f'<path class="published" d="M{frame.left} {at:.1f}H{frame.width - frame.right}">'
            f"<title>{escape(name)}: {number(value)}</title></path>"
        )
    for index, (xs, mean, low, high) in curves.items():
        color = f"var(--c{index % NUM_COLORS})"
        if len(cells[index].runs) > 1:
            parts.append(f'<path class="band" d="{frame.band(xs, low, high)}" style="fill:{color}"/>')
        points = [(float(a), float(b)) for a, b in zip(xs, mean)]
        parts.append(f'<path class="line" d="{frame.path(points)}" {stroke(index)}/>')
    return frame.svg("".join(parts), f"learning curves of {task.name}")


def _mean_curve(cell: Cell) -> tuple[Array, Array, Array, Array] | None:
    """Steps, and mean, lowest and highest return over seeds there; over the steps that all seeds have."""
    curves = [np.array(row["curve"], dtype=float) for row in cell.runs if row.get("curve")]
    if not curves:
        return None
    start, end = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    longest = max(curves, key=len)[:, 0]
    xs = np.unique(np.clip(longest, start, max(start, end)))
    values = np.stack([np.interp(xs, curve[:, 0], curve[:, 1]) for curve in curves])
    return xs, values.mean(0), values.min(0), values.max(0)


def intervals(rows: Sequence[tuple[str, Estimate]], title: str) -> str:
    """One dot with its interval per row."""
    ends = [end for _, (value, interval) in rows for end in (interval or (value, value))]
    low, high = min(0.0, *ends), max(1.0, *ends)
    line, left = 26, 24 + 8 * max(len(name) for name, _ in rows)
    frame = _Frame(480, line * len(rows) + 30, (low, high), (0.0, 1.0), left, right=52)
    marks = {0.0: "0", 0.5: "0.5", 1.0: "1"}
    parts = [
        f'<path class="grid" d="M{frame.x(v):.1f} 4V{frame.height - 20}"/><text x="{frame.x(v):.1f}" y="{frame.height - 5}" '
        f'text-anchor="middle">{text}</text>'
        for v, text in marks.items()
    ]
    for position, (name, (value, interval)) in enumerate(rows):
        y = 16 + line * position
        parts.append(f'<text class="name" x="{left - 12}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        if interval is not None:
            a, b = frame.x(interval[0]), frame.x(interval[1])
            parts.append(
                f'<path class="interval" d="M{a:.1f} {y - 5}V{y + 5}M{a:.1f} {y}H{b:.1f}M{b:.1f} {y - 5}V{y + 5}"/>'
            )
        parts.append(f'<circle class="dot" cx="{frame.x(value):.1f}" cy="{y}" r="5"/>')
        parts.append(f'<text class="name" x="{frame.width}" y="{y + 4}" text-anchor="end">{value:.3f}</text>')
    return frame.svg("".join(parts), title)


def profiles(found: Sequence[PerformanceProfile]) -> str:
    """Performance profiles, one line each."""
    xs = found[0].thresholds
    frame = _Frame(480, 250, (float(xs[0]), float(xs[-1])), (0.0, 1.0))
    parts = [frame.axes({0.0: "0", 0.5: "0.5", 1.0: "1"}, {0.0: "0", 0.5: "50%", 1.0: "100%"})]
    for index, profile in enumerate(found):
        if not np.array_equal(profile.low, profile.high):
            band = frame.band(profile.thresholds, profile.low, profile.high)
            parts.append(f'<path class="band" d="{band}" style="fill:var(--c{index % NUM_COLORS})"/>')
        points = [(float(a), float(b)) for a, b in zip(profile.thresholds, profile.share)]
        parts.append(f'<path class="line" d="{frame.path(points)}" {stroke(index)}/>')
    return frame.svg("".join(parts), "share of runs above each normalized score")


def _range(ends: Point) -> Point:
    low, high = ends
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _tick(value: float) -> str:
    """
    >>> _tick(0.3), _tick(-217.9), _tick(500.0), _tick(-0.5)
    ('0.30', '-218', '500', '-0.50')
    """
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
