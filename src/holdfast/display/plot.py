"""Learning curves of runs as a PNG: mean or interquartile mean over seeds, with its 95% interval, one line per group.

Lines differ in color, dashes and markers, so that they can be told apart in black and white. With two seeds the band is their
range: an interval from two numbers is wider than any picture.

    plot_runs(["runs/TMaze-v0/lstm-seed1", "runs/TMaze-v0/lstm-seed2"], Path("curves.png"))

It reads only `progress.csv` and `config.json` of run folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holdfast.display.aggregate import bootstrap_interval, interquartile_mean
from holdfast.display.dashboard import compact
from holdfast.runs.log import CSV_NAME, read_progress

# 97.5% quantiles of Student's t by degrees of freedom, from 1; beyond the table, that of the normal distribution.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
# Runs of one group may differ in these settings, which say nothing about what is learned.
_NOT_A_GROUP = {
    "env", "seed", "name", "run_dir", "quiet", "track", "tensorboard", "threads", "device", "checkpoint_every",
    "keep_checkpoints", "eval_every", "eval_episodes", "final_eval_episodes", "replay_check_every", "env_timeout",
    "env_failure", "max_env_failures", "max_bad_updates",
}  # fmt: skip
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#8c6d1f", "#56b4e9")
_DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "X")
_POINTS_WITH_MARKERS = 8
GRID_POINTS = 200

Aggregate = Literal["mean", "iqm"]


@dataclass
class Run:
    """The curve of one run: steps and values of the metric, where it has one."""

    folder: Path
    config: dict[str, Any]
    steps: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


@dataclass
class Curve:
    """The mean over a group of runs on a common grid of n steps, with its 95% interval ([2, n]; None for one run).

    aggregate: "mean" with Student's interval, or "iqm", the interquartile mean with a bootstrap interval. With two runs
    the interval is their range.
    """

    label: str
    runs: list[Run]
    aggregate: Aggregate = "mean"
    steps: np.ndarray[Any, Any] = field(init=False)
    mean: np.ndarray[Any, Any] = field(init=False)
    interval: np.ndarray[Any, Any] | None = field(init=False)

    def __post_init__(self) -> None:
        # Only where all runs have values: the curve would jump where a run ends.
        first, last = max(run.steps[0] for run in self.runs), min(run.steps[-1] for run in self.runs)
        self.steps = np.linspace(first, max(first, last), GRID_POINTS)
        table = np.stack([np.interp(self.steps, run.steps, run.values) for run in self.runs])  # [runs, n]
        if self.aggregate == "iqm" and len(table) > 2:
            self.mean, self.interval = interquartile_mean(table), bootstrap_interval([table])
        else:
            self.mean, self.interval = confidence_interval(table)


def confidence_interval(table: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Mean [n] over the rows of [runs, n], and its 95% interval by Student's t [2, n]; the range of two rows; None for one."""
    mean = table.mean(0)
    count = len(table)
    if count < 2:
        return mean, None
    if count == 2:
        return mean, np.stack([table.min(0), table.max(0)])
    t = _T[count - 2] if count - 2 < len(_T) else 1.96
    half = t * table.std(0, ddof=1) / np.sqrt(count)
    return mean, np.stack([mean - half, mean + half])


def plot_runs(
    run_dirs: Iterable[str | Path],
    out: str | Path,
    *,
    metric: str = "rollout/ep_rew_mean",
    group: str | Sequence[str] = "auto",
    aggregate: Aggregate = "mean",
    notify: Callable[[str], None] = lambda text: None,
) -> Path:
    """Draw `metric` over steps: a panel per environment, a line per group of runs that differ only in their seed.

    group: names of settings ("core", or "core,hidden_size") that make a group; "auto" takes those that differ
    between the runs. aggregate: how the runs of a group become one line, "mean" or "iqm". notify: is told which folders
    have nothing to draw; if none has, that is a ValueError.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'holdfast[plot]'") from missing
    panels = group_runs(_read_runs(run_dirs, metric, notify), group, aggregate)
    figure = Figure(figsize=(1.5 + 5.5 * len(panels), 4.6), layout="constrained")
    for axes, (env, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        _draw_panel(axes, env, curves, metric)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, bbox_inches="tight")
    return out


def _read_runs(run_dirs: Iterable[str | Path], metric: str, notify: Callable[[str], None]) -> list[Run]:
    """The runs that have something to draw."""
    runs: list[Run] = []
    problems: list[Exception] = []
    for folder in run_dirs:
        try:
            runs.append(read_run(folder, metric))
        except (ValueError, FileNotFoundError) as error:
            problems.append(error)
    if not runs and len(problems) == 1:
        raise problems[0]
    if not runs and problems:
        raise ValueError(f"{problems[0]}; and {len(problems) - 1} other folders have nothing to draw either")
    if not runs:
        raise ValueError("no runs to plot; pass run folders, such as runs/RepeatPreviousEasy-v0/*")
    for problem in problems:
        notify(f"left out: {problem}")
    return runs


def read_run(folder: str | Path, metric: str) -> Run:
    """The curve of a run; raises an error that says what is missing."""
    folder = Path(folder)
    if not (folder / CSV_NAME).exists():
        raise FileNotFoundError(f"{folder} is not a run folder: it has no {CSV_NAME}")
    rows = read_progress(folder)
    if rows and metric not in rows[0]:
        raise ValueError(f"{folder} has no metric {metric!r}; it has {', '.join(rows[0])}")
    pairs = np.array([(float(row["steps"]), float(row[metric] or "nan")) for row in rows]).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs[:, 1])]
    if not len(pairs):
        raise ValueError(f"{folder} has no values of {metric!r} yet")
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    return Run(folder, config, pairs[:, 0], pairs[:, 1])


def group_runs(
    runs: Sequence[Run], group: str | Sequence[str] = "auto", aggregate: Aggregate = "mean"
) -> dict[str, list[Curve]]:
    """Curves by environment. Runs of a group share the environment and the settings named by `group`."""
    settings = list(dict.fromkeys(key for run in runs for key in run.config))
    if group == "auto":
        names = [key for key in settings if key not in _NOT_A_GROUP and _differs(runs, key)]
        names.sort(key=lambda key: key != "core")  # core first
    else:
        names = [name.strip() for name in (group.split(",") if isinstance(group, str) else group)]
        unknown = [name for name in names if name not in settings]
        if unknown:
            raise ValueError(f"group by {unknown[0]!r}: no such setting in these runs; they have {', '.join(settings)}")
    panels: dict[str, list[Run]] = {}
    for run in runs:
        panels.setdefault(str(run.config.get("env", "")), []).append(run)
    return {env: _curves(members, names, aggregate, shorten=group == "auto") for env, members in panels.items()}


def _curves(runs: list[Run], names: list[str], aggregate: Aggregate, shorten: bool) -> list[Curve]:
    """A curve per group of one environment, labeled by as few settings as tell the groups apart."""
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        members.setdefault(_values(run, names), []).append(run)
    shown: list[str] = []
    for name in names if shorten else ():
        if _num_different(runs, [*shown, name]) > _num_different(runs, shown):
            shown.append(name)
    shown = shown if shorten else names
    curves = []
    for group in members.values():
        config = group[0].config
        label = ", ".join(_label(name, config.get(name)) for name in shown) or _label("core", config.get("core", "run"))
        curves.append(Curve(label, group, aggregate))
    return curves


def _values(run: Run, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_as_text(run.config.get(name)) for name in names)


def _num_different(runs: Sequence[Run], names: Sequence[str]) -> int:
    return len({_values(run, names) for run in runs})


def _differs(runs: Sequence[Run], setting: str) -> bool:
    """Whether runs of one environment have different values of a setting."""
    values: dict[str, set[str]] = {}
    for run in runs:
        values.setdefault(str(run.config.get("env")), set()).add(_as_text(run.config.get(setting)))
    return any(len(found) > 1 for found in values.values())


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _label(name: str, value: Any) -> str:
    if name == "core":
        return "no memory" if value == "none" else str(value)
    return f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _draw_panel(axes: Any, env: str, curves: list[Curve], metric: str) -> None:
    for number, curve in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        if len(curve.runs) > 1:
            for run in curve.runs:
                axes.plot(run.steps, run.values, color=color, linewidth=0.6, alpha=0.35)
        if curve.interval is not None:
            axes.fill_between(curve.steps, *curve.interval, color=color, alpha=0.15, linewidth=0)
        gap = GRID_POINTS // _POINTS_WITH_MARKERS
        axes.plot(
            curve.steps,
            curve.mean,
            color=color,
            linewidth=1.8,
            linestyle=_DASHES[number % len(_DASHES)],
            marker=_MARKERS[number % len(_MARKERS)] if len(curves) > 1 else None,
            markersize=5,
            markevery=(number * gap // max(1, len(curves)), gap),  # not on top of each other
            label=_legend_text(curve, curves),
        )
    _draw_known_returns(axes, env, metric)
    axes.set_title(_title(env, curves), fontsize=11)
    axes.set_xlabel("environment steps")
    axes.set_ylabel(
        {"rollout/ep_rew_mean": "mean return", "eval/mean_return": "return in evaluation"}.get(metric, metric)
    )
    axes.xaxis.set_major_formatter(lambda steps, _: compact(steps))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        longest = max(len(_legend_text(curve, curves)) for curve in curves)
        columns = min(len(curves), max(1, 70 // (longest + 6)))
        axes.legend(
            frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, handlelength=3.5
        )


def _legend_text(curve: Curve, curves: list[Curve]) -> str:
    """The group; the number of its runs only if that differs too."""
    same = len({len(each.runs) for each in curves}) == 1
    return curve.label if same else f"{curve.label} ({_seeds(curve)})"


def _seeds(curve: Curve) -> str:
    count = len(curve.runs)
    return f"{count} seeds" if count > 1 else f"seed {curve.runs[0].config.get('seed', '?')}"


def _title(env: str, curves: list[Curve]) -> str:
    """The environment, what a line is if there is only one, and what the bands are."""
    title = env.removeprefix("holdfast/")
    counts = {len(curve.runs) for curve in curves}
    if len(curves) == 1:
        title += f", {curves[0].label}, {_seeds(curves[0])}"
    elif counts == {1} and len({str(curve.runs[0].config.get("seed")) for curve in curves}) == 1:
        title += f", {_seeds(curves[0])}"
    elif len(counts) == 1:
        title += f", {_seeds(curves[0])}" if counts != {1} else ""
    if counts == {1}:
        return title
    middle = "interquartile mean" if curves[0].aggregate == "iqm" and max(counts) > 2 else "mean"
    bands = "range" if max(counts) == 2 else "95% interval" + (", range of two seeds" if 2 in counts else "")
    return f"{title}\n{middle}, {bands}"


def _draw_known_returns(axes: Any, env: str, metric: str) -> None:
    """Dotted lines at the returns of chance and of a perfect policy, if the environment comes with Holdfast."""
    from holdfast.envs.catalog import list_envs

    if metric not in ("rollout/ep_rew_mean", "eval/mean_return"):
        return
    for row in (row for row in list_envs() if row.id == env):
        for value, name in ((row.chance_return, "chance"), (row.solved_return, "solved")):
            axes.axhline(value, color="#888888", linewidth=0.8, linestyle=":")
            axes.annotate(
                name,
                (1.01, value),
                xycoords=("axes fraction", "data"),
                ha="left",
                va="center",
                fontsize=8,
                color="#888888",
            )
