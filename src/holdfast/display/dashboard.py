"""The dashboard of a training run: pure functions from a `RunView` to rich renderables. `live.py` shows it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.display import chart
from holdfast.distributed.metrics import Metric

ACCENT, TREND = "#4dd0e1", "#5c8fd6"
LABEL, FAINT, EMPTY = "#9e9e9e", "#6b6b6b", "#3a3a3a"
GOOD, CAREFUL, BAD = "#81c784", "#ffb74d", "#ef5350"
VALUE = "bold #eeeeee"

MOST_LOSSES = 8
MIN_WIDTH, MIN_HEIGHT = 24, 8
"""Of a terminal; a smaller one is too small for a dashboard."""
MIN_CHART, MAX_CHART = 3, 9  # lines
MAX_WARNINGS = 3
_TIMES = (("env", "time/env", "#aed581"), ("policy", "time/policy", ACCENT), ("update", "time/update", "#ba68c8"))


@dataclass
class RunView:
    """Everything that the dashboard shows; `Display` keeps it up to date."""

    title: str
    subtitle: str
    total_steps: int
    num_updates: int
    metrics: Sequence[Metric] = ()
    """What the run computes; those of updates have keys "train/..."."""
    actions: Mapping[str, str] = field(default_factory=dict)
    """How those of "training" and of "evaluation" are drawn."""
    chance: float | None = None
    """Return of random actions, if the environment comes with Holdfast."""
    solved: float | None = None
    """Best possible return, if the environment comes with Holdfast."""
    row: dict[str, float] = field(default_factory=dict)
    """The last known finite value of each metric."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """(steps, rollout/ep_rew_mean) of every update."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Values of each metric in every update."""
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of time in env, policy and update over the last updates."""
    elapsed: float = 0.0
    """Seconds since the start."""
    remaining: float | None = None
    """Seconds until the end."""
    warnings: list[str] = field(default_factory=list)
    """All warnings so far; the last few are shown."""


def render(progress: RunView, width: int, height: int) -> RenderableType:
    """The whole dashboard for a terminal of this size; without its tables where they do not fit."""
    inner = max(MIN_WIDTH, min(width, 118)) - 4
    recent = progress.warnings[-MAX_WARNINGS:]
    # Around chart and warnings there are 5 lines: frame 2, headline, progress, and one for the cursor. The tables take 10
    # with the blank line before them, and are left out where chart and warnings do not fit next to them.
    has_tables = inner >= 50 and height >= 15 + MIN_CHART + (1 + len(recent) if recent else 0)
    left = height - (15 if has_tables else 5)
    warnings = _warnings(recent, inner, left - MIN_CHART)
    chart_height = max(MIN_CHART, min(MAX_CHART, left - len(warnings)))
    parts: list[RenderableType] = [
        _headline(progress),
        *_return_chart(progress, inner, chart_height),
        _progress_line(progress, inner),
    ]
    if has_tables:
        parts += [Text(), _tables(progress, inner)]
    parts += warnings
    title = Text.assemble((" holdfast ", f"bold {ACCENT}"), (progress.title + " ", VALUE))
    subtitle = Text(f" {progress.subtitle} ", FAINT)
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=subtitle,
        subtitle_align="left",
        border_style=FAINT,
        padding=(0, 1),
        width=inner + 4,
    )


# --- parts ------------------------------------------------------------------------------------------------------


def _warnings(warnings: list[str], width: int, room: int) -> list[Text]:
    """A blank line and the warnings in at most `room` lines: one for each, the rest for the newest first."""
    warnings = warnings[-max(0, room - 1) :] if room > 1 else []
    spare = room - 1 - len(warnings)
    lines: list[Text] = []
    for warning in reversed(warnings):
        wrapped = textwrap.wrap(warning, width - 2, max_lines=1 + spare, placeholder=" …") or [""]
        spare -= len(wrapped) - 1
        marks = ["! ", *["  "] * (len(wrapped) - 1)]
        parts = [Text.assemble((mark, f"bold {CAREFUL}"), (line, CAREFUL)) for mark, line in zip(marks, wrapped)]
        for part in parts:  # wide characters take two columns
            part.no_wrap, part.overflow = True, "ellipsis"
        lines = parts + lines
    return [Text(), *lines] if lines else []


def _tables(progress: RunView, inner: int) -> Table:
    slack = max(0, inner - 76)
    tables = Table.grid(padding=(0, 3 + slack // 8, 0, 0))
    if inner >= 76:
        columns = [_time_table(progress, 8 + slack // 6), _loss_table(progress, 8 + slack // 3)]
    else:
        columns = [_loss_table(progress, 6)]
    tables.add_row(*columns, _memory_table(progress))
    return tables


def _headline(progress: RunView) -> Text:
    row = progress.row
    line = Text(no_wrap=True, overflow="ellipsis")
    value = row.get("rollout/ep_rew_mean", math.nan)
    differ = len(set(progress.actions.values())) > 1
    drawn = {name: f" ({how})" for name, how in progress.actions.items() if differ}
    line.append(f"return{drawn.get('training', '')} ", LABEL)
    line.append(number(value), f"bold {ACCENT}")
    best = [y for _, y in progress.curve if math.isfinite(y)]
    for label, text in (
        (
            f"evaluation{drawn.get('evaluation', '')}",
            number(row["eval/mean_return"]) if "eval/mean_return" in row else "",
        ),
        ("best", number(max(best)) if best else "-"),
        ("length", number(row.get("rollout/ep_len_mean", math.nan), digits=0)),
        ("update", f"{row.get('update', 0):.0f}/{progress.num_updates}"),
    ):
        if text:
            line.append(f"   {label} ", LABEL).append(text, VALUE)
    return line


def _return_chart(progress: RunView, inner: int, height: int) -> list[Text]:
    """The return over the whole run, with dotted lines at the known returns of chance and of a solved task."""
    margin = 8
    width = inner - margin
    finite = [y for _, y in progress.curve if math.isfinite(y)]
    marks = [y for y in (progress.chance, progress.solved) if y is not None]
    low, high = min([*finite, *marks], default=0.0), max([*finite, *marks], default=1.0)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    drawn = chart.curve(progress.curve, width, height, (0, progress.total_steps), (low, high))

    def line_of(y: float) -> int:
        return height - 1 - min(height - 1, max(0, int((y - low) / (high - low) * height)))

    labels = {0: number(high, 2), height - 1: number(low, 2)}
    if height % 2 and height >= 5:
        labels[height // 2] = number((low + high) / 2, 2)
    dotted = {
        line_of(y): name for y, name in ((progress.chance, "chance"), (progress.solved, "solved")) if y is not None
    }
    lines = []
    for i, cells in enumerate(drawn):
        line = Text(labels.get(i, "").rjust(margin - 2), LABEL)
        line.append(" ┤" if i in labels else " │", FAINT)
        # The name of a dotted line is at its right end, which the curve reaches last.
        name = dotted.get(i)
        behind = name.rjust(width, "┈") if name else " " * width
        for is_curve, run in groupby(zip(cells, behind), key=lambda pair: pair[0] != "⠀"):
            text = "".join(cell if is_curve else mark for cell, mark in run)
            line.append(text, ACCENT if is_curve else FAINT)
        lines.append(line)
    return lines


def _progress_line(progress: RunView, inner: int) -> Text:
    row = progress.row
    steps = row.get("steps", 0.0)
    share = min(1.0, steps / progress.total_steps) if progress.total_steps else 0.0
    fps = row.get("time/fps", math.nan)
    right = Text()
    for part in (
        Text(f" {share:4.0%}", VALUE),
        Text(f"  {compact(steps)}/{compact(progress.total_steps)} steps", LABEL),
        Text.assemble(("  " + (f"{fps:,.0f}" if math.isfinite(fps) else "-"), VALUE), (" steps/s", LABEL)),
        Text("  " + clock(progress.elapsed), VALUE),
        Text.assemble((" left ", LABEL), (clock(progress.remaining) if progress.remaining is not None else "-", VALUE)),
    ):
        if len(right) + len(part) + 8 <= inner:
            right.append_text(part)
    width = inner - len(right)
    filled = round(share * width)
    return Text.assemble(("━" * filled, ACCENT), ("━" * (width - filled), EMPTY), right)


def _table(title: str, label_width: int, *columns: tuple[JustifyMethod, int]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=f"bold {ACCENT}")
    table.add_column(title, style=LABEL, no_wrap=True, width=label_width)
    for justify, width in columns:
        table.add_column("", no_wrap=True, justify=justify, width=width)
    return table


def _time_table(progress: RunView, bar_width: int) -> Table:
    table = _table("time", 6, ("left", bar_width), ("right", 4))
    rest = 1.0 - sum(progress.shares.values()) if progress.shares else 0.0
    for label, key, color in (*_TIMES, ("rest", "rest", FAINT)):
        share = max(0.0, rest) if key == "rest" else progress.shares.get(key, 0.0)
        table.add_row(label, Text(chart.bar(share, bar_width), color), Text(f"{share:.0%}", VALUE))
    return table


def _loss_table(progress: RunView, trend_width: int) -> Table:
    table = _table("update", 11, ("right", 8), ("left", trend_width))
    shown = [m for m in progress.metrics if m.key.startswith("train/") and m.label and m.key in progress.row]
    for metric in shown[:MOST_LOSSES]:
        trend = chart.sparkline(progress.history.get(metric.key, []), trend_width)
        table.add_row(metric.label, Text(written(progress.row[metric.key], metric.form), VALUE), Text(trend, TREND))
    return table


def _memory_table(progress: RunView) -> Table:
    table = _table("memory", 10, ("right", 8))
    row = progress.row

    def add(label: str, key: str, text: str, style: str = VALUE) -> None:
        if key in row:
            table.add_row(label, Text(text, style))

    saturation, gap = row.get("memory/saturation", 0.0), row.get("memory/replay_gap", 0.0)
    add("state rms", "memory/rms", number(row.get("memory/rms", 0.0)))
    add("state max", "memory/max", number(row.get("memory/max", 0.0)))
    add("saturated", "memory/saturation", f"{saturation:.1%}", f"bold {CAREFUL if saturation > 0.3 else GOOD}")
    add("replay gap", "memory/replay_gap", f"{gap:.1e}", f"bold {GOOD if gap <= 1e-2 else BAD}")
    add("stale by", "memory/staleness", f"{row.get('memory/staleness', 0.0):.1e}")
    add("resets", "memory/resets", number(row.get("memory/resets", 0.0), digits=0))
    if row.get("memory/nan", 0.0) > 0:
        add("NaN", "memory/nan", number(row["memory/nan"], digits=0), f"bold {BAD}")
    return table


# --- numbers as text --------------------------------------------------------------------------------------------


def number(value: float, digits: int = 3) -> str:
    """A number, short enough for a table.

    >>> number(0.12345), number(1234.5), number(float("nan")), number(0.00001234)
    ('0.123', '1,234', '-', '1.2e-05')
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1000 or digits == 0:
        return f"{value:,.0f}"
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def written(value: float, form: str) -> str:
    """A metric, in the form that it declares."""
    forms = {"percent": f"{value:.1%}", "exponent": f"{value:.1e}", "count": number(value, digits=0)}
    return forms.get(form, number(value, digits=4))


def compact(count: float) -> str:
    """A count in thousands or millions.

    >>> compact(600_000), compact(1_250_000), compact(512)
    ('600k', '1.25M', '512')
    """
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:.0f}"


def counted(count: int, thing: str) -> str:
    """A count and what is counted, in the singular or the plural.

    >>> counted(1, "fresh episode"), counted(1200, "run")
    ('1 fresh episode', '1,200 runs')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or hours, minutes and seconds.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain_line(
    row: Mapping[str, float], num_updates: int, remaining: float | None, metrics: Sequence[Metric] = ()
) -> str:
    """One update on one line, for log files and pipes."""
    count = str(num_updates)
    evaluated = row.get("eval/mean_return", math.nan)
    parts = (
        f"update {row.get('update', 0):{len(count)}.0f}/{count}",
        f"{compact(row.get('steps', 0)):>5} steps",
        f"return {number(row.get('rollout/ep_rew_mean', math.nan)):>6}",
        f"length {number(row.get('rollout/ep_len_mean', math.nan), digits=0):>4}",
        *(f"{m.short} {number(row.get(m.key, math.nan), m.digits):>{m.digits + 2}}" for m in metrics if m.short),
        f"{row.get('time/fps', 0):>7,.0f} steps/s",
        f"left {clock(remaining)}" if remaining is not None else "",
        f"evaluation {number(evaluated)}" if math.isfinite(evaluated) else "",
    )
    return "  ".join(part for part in parts if part)
