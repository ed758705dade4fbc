"""Learning curves of runs as a PNG: mean or interquartile mean over seeds, with its 95% interval, one line per group.

    plot_runs(["runs/TMaze-v0/lstm-seed1", "runs/TMaze-v0/lstm-seed2"], Path("curves.png"))

It reads only `progress.csv` and `config.json` of run folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holdfast.display.aggregate import bootstrap_interval, interquartile_mean
from holdfast.display.dashboard import compact
from holdfast.runs.log import CSV_NAME, read_progress

# 97.5% quantiles of Student's t by degrees of freedom, from 1; beyond the table, that of the normal distribution.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
# Runs of one group may differ in these settings.
_NOT_A_GROUP = {"env", "seed", "name", "run_dir", "quiet", "track", "tensorboard", "threads", "device"}
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
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

    aggregate: "mean" with Student's interval, or "iqm", the interquartile mean with a bootstrap interval.
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
        if self.aggregate == "iqm" and len(table) > 1:
            self.mean, self.interval = interquartile_mean(table), bootstrap_interval([table])
        else:
            self.mean, self.interval = confidence_interval(table)


def confidence_interval(table: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Mean [n] over the rows of [runs, n], and its 95% interval by Student's t [2, n]; None for one row."""
    mean = table.mean(0)
    count = len(table)
    if count < 2:
        return mean, None
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
) -> Path:
    """Draw `metric` over steps: a panel per environment, a line per group of runs that differ only in their seed.

    group: names of settings ("core", or "core,hidden_size") that make a group; "auto" takes those that differ
    between the runs. aggregate: how the runs of a group become one line, "mean" or "iqm".
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'holdfast[plot]'") from missing
    runs = [read_run(folder, metric) for folder in run_dirs]
    if not runs:
        raise ValueError("no runs to plot; pass run folders, such as runs/RepeatPreviousEasy-v0/*")
    panels = group_runs(runs, group, aggregate)
    figure = Figure(figsize=(1.5 + 5.5 * len(panels), 4.2), layout="constrained")
    for axes, (env, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        _draw_panel(axes, env, curves, metric)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    return out


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
    members: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        label = ", ".join(_label(name, run.config.get(name)) for name in names) or _label(
            "core", run.config.get("core", "run")
        )
        members.setdefault(str(run.config.get("env", "")), {}).setdefault(label, []).append(run)
    return {env: [Curve(label, part, aggregate) for label, part in groups.items()] for env, groups in members.items()}


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
    return f"{name} {value}"


def _draw_panel(axes: Any, env: str, curves: list[Curve], metric: str) -> None:
    for curve, color in zip(curves, _COLORS * (1 + len(curves) // len(_COLORS))):
        count = len(curve.runs)
        if count > 1:
            for run in curve.runs:
                axes.plot(run.steps, run.values, color=color, linewidth=0.6, alpha=0.35)
        if curve.interval is not None:
            axes.fill_between(curve.steps, *curve.interval, color=color, alpha=0.18, linewidth=0)
        how = ", interquartile mean" if curve.aggregate == "iqm" else ""
        seeds = f"{count} seeds{how}" if count > 1 else f"seed {curve.runs[0].config.get('seed', '?')}"
        axes.plot(curve.steps, curve.mean, color=color, linewidth=1.8, label=f"{curve.label} ({seeds})")
    _draw_known_returns(axes, env, metric)
    axes.set_title(env.removeprefix("holdfast/"), fontsize=11)
    axes.set_xlabel("environment steps")
    axes.set_ylabel(
        {"rollout/ep_rew_mean": "mean return", "eval/mean_return": "return in evaluation"}.get(metric, metric)
    )
    axes.xaxis.set_major_formatter(lambda steps, _: compact(steps))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


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
                (1, value),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                color="#888888",
            )
