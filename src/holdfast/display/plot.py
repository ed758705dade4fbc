"""Learning curves of runs as a PNG: mean or interquartile mean over seeds, with its 95% interval, one line per group.

Lines differ in color, dashes and markers, so that they can be told apart in black and white. With two seeds the band is their
range: an interval from two numbers is wider than any picture.

    plot_runs(["runs/TMaze-v0/lstm-seed1", "runs/TMaze-v0/lstm-seed2"], Path("curves.png"))

Training episodes and evaluations often draw their actions differently, so the picture says which returns it shows. It reads only
`progress.csv` and the JSON files of run folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holdfast.display.aggregate import bootstrap_interval, interquartile_mean, is_mean_and_range
from holdfast.display.dashboard import compact
from holdfast.display.figures import new_figure, save_figure
from holdfast.display.plot_labels import differing, given_name, labels, values
from holdfast.runs.log import CSV_NAME, RESULT_NAME, read_progress

# 97.5% quantiles of Student's t by degrees of freedom, from 1; beyond the table, that of the normal distribution.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#8c6d1f", "#56b4e9")
_DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "X")
_POINTS_WITH_MARKERS = 8
_INCHES_PER_LETTER, _INCHES_PER_ROW = 0.075, 0.2  # of a legend
GRID_POINTS = 200
TRAINING, EVALUATION = "rollout/ep_rew_mean", "eval/mean_return"
_FEW_EVALUATIONS = 3  # below, lines are compared by their training episodes
_PANELS_IN_A_ROW = 4

Aggregate = Literal["mean", "iqm"]


@dataclass
class Run:
    """The curve of one run: steps and values of the metric, where it has one."""

    folder: Path
    config: dict[str, Any]
    steps: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    half_widths: np.ndarray[Any, Any] | None = None
    """Of the 95% intervals of evaluations, by Student's t over their episodes."""
    actions: Mapping[str, str] = field(default_factory=dict)
    """How those of "training" and "evaluation" were drawn; {} if the run does not say."""

    @property
    def differs(self) -> bool:
        """Whether training episodes and evaluations draw their actions in different ways."""
        return len(set(self.actions.values())) > 1


@dataclass
class Curve:
    """The mean over a group of runs on a common grid of n steps, with its 95% interval ([2, n]; None for one run).

    aggregate: "mean" with Student's interval, or "iqm", the interquartile mean with a bootstrap interval. With few runs
    (`is_range`) these are their mean and range.
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

    @property
    def is_range(self) -> bool:
        """Whether there are so few runs that they have their mean and range."""
        return is_mean_and_range(len(self.runs)) if self.aggregate == "iqm" else len(self.runs) <= 2


def confidence_interval(table: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Mean [n] over the rows of [runs, n], and its 95% interval by Student's t [2, n]; the range of two rows; None for one."""
    mean = table.mean(0)
    count = len(table)
    if count < 2:
        return mean, None
    if count == 2:
        return mean, np.stack([table.min(0), table.max(0)])
    half = student(count) * table.std(0, ddof=1) / np.sqrt(count)
    return mean, np.stack([mean - half, mean + half])


def student(count: float) -> float:
    """The 97.5% quantile for the mean of `count` numbers; NaN for one."""
    if not count >= 2:
        return float("nan")
    return _T[int(count) - 2] if count - 2 < len(_T) else 1.96


def plot_runs(
    run_dirs: Iterable[str | Path],
    out: str | Path,
    *,
    metric: str = "auto",
    group: str | Sequence[str] = "auto",
    aggregate: Aggregate = "mean",
    notify: Callable[[str], None] = lambda text: None,
) -> Path:
    """Draw `metric` over steps: a panel per environment, a line per group of runs that differ only in their seed.

    metric: a column of progress.csv. "auto" is the return: a group alone shows its training episodes, and its evaluations if there
    are any; several groups are compared by their evaluations where these draw actions in another way than training and all runs
    have at least three, otherwise by their training episodes. group: names of settings ("core", or "core,hidden_size") that make
    a group; "auto" takes those that differ between the runs. aggregate: how the runs of a group become one line, "mean" or "iqm".
    notify: is told which folders have nothing to draw; if none has, that is a ValueError.
    """
    folders = list(run_dirs)
    runs = _read_runs(folders, TRAINING if metric == "auto" else metric, notify)
    if metric != "auto":
        return draw(runs, out, metric=metric, group=group, aggregate=aggregate)
    evaluated = {run.folder: run for run in _evaluated(runs)}
    several = any(len(curves) > 1 for curves in group_runs(runs, group).values())
    enough = [run for run in evaluated.values() if run.differs and len(run.steps) >= _FEW_EVALUATIONS]
    if several and len(enough) == len(runs):
        return draw(list(evaluated.values()), out, metric=EVALUATION, group=group, aggregate=aggregate)
    return draw(runs, out, group=group, aggregate=aggregate, evaluated=evaluated)


def draw(
    runs: Sequence[Run],
    out: str | Path,
    *,
    metric: str = TRAINING,
    group: str | Sequence[str] = "auto",
    aggregate: Aggregate = "mean",
    evaluated: Mapping[Path, Run] | None = None,
) -> Path:
    """As `plot_runs`, of runs that have been read. evaluated: evaluations, by folder; drawn beside a group that is alone."""
    panels = []
    for env, curves in group_runs(runs, group, aggregate).items():
        title = _title(env, curves)
        beside = [evaluated[run.folder] for run in curves[0].runs if evaluated and run.folder in evaluated]
        if len(curves) == 1 and len(beside) == len(curves[0].runs):
            curves = [
                Curve(_which(TRAINING, curves[0].runs), curves[0].runs, aggregate),
                Curve(_which(EVALUATION, beside), beside, aggregate),
            ]
        panels.append((env, title, curves))
    columns = min(len(panels), _PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    width, height = _size([curves for *_, curves in panels])
    figure = new_figure((1.5 + width * columns, height * rows))
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (env, title, curves) in zip(places, panels):
        _draw_panel(axes, env, curves, metric, title)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    return save_figure(figure, Path(out), bbox_inches="tight")


def _evaluated(runs: Sequence[Run]) -> list[Run]:
    """The evaluations of runs that have any. The result is the last one, in place of that of the same update."""
    found = []
    for run in runs:
        points: dict[float, tuple[float, float]] = {}
        with suppress(ValueError):
            evaluated = read_run(run.folder, EVALUATION)
            assert evaluated.half_widths is not None
            points = dict(zip(evaluated.steps.tolist(), zip(evaluated.values, evaluated.half_widths)))
        with suppress(OSError, ValueError, KeyError, TypeError):
            result = json.loads((run.folder / RESULT_NAME).read_text())
            half_width = student(result["episodes"]) * float(result["std_error"])
            if result["steps"] >= run.steps[-1] and np.isfinite(result["mean_return"]):
                points[float(result["steps"])] = float(result["mean_return"]), half_width
        if points:
            values, half_widths = np.array(list(points.values())).T
            found.append(replace(run, steps=np.array(list(points)), values=values, half_widths=half_widths))
    return found


def _which(metric: str, runs: Sequence[Run]) -> str:
    """Which returns a line shows; how their actions were drawn, if that makes a difference and is the same in all runs."""
    name, leg = ("training episodes", "training") if metric == TRAINING else ("evaluation", "evaluation")
    drawn = {run.actions.get(leg, "") if run.differs else "" for run in runs}
    return ", ".join([name, *(filter(None, drawn) if len(drawn) == 1 else ())])


def _size(panels: list[list[Curve]]) -> tuple[float, float]:
    """Width and height in inches of a panel, such that legends leave the curves their room."""
    width = max(5.5, *(_INCHES_PER_LETTER * (_longest(curves) + 8) for curves in panels))
    rows = max(-(-len(curves) // _columns(curves)) for curves in panels)
    return width, 4.4 + _INCHES_PER_ROW * rows


def _longest(curves: list[Curve]) -> int:
    """Letters of the longest text in the legend; 0 if there is no legend."""
    return max(len(_legend_text(curve, curves)) for curve in curves) if len(curves) > 1 else 0


def _columns(curves: list[Curve]) -> int:
    return min(len(curves), max(1, 70 // (_longest(curves) + 6)))


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
    try:
        spread = ("eval/std_error", "eval/episodes")  # earlier versions did not write them
        numbers = [
            [float(row["steps"]), float(row[metric] or "nan"), *(float(row.get(name) or "nan") for name in spread)]
            for row in rows
        ]
        pairs = np.array(numbers).reshape(-1, 4)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / CSV_NAME} is damaged: a row has no number of steps, or no number as {metric!r}"
        ) from error
    pairs = pairs[np.isfinite(pairs[:, 1])]
    if not len(pairs):
        raise ValueError(f"{folder} has no values of {metric!r} yet")
    half_widths = np.array([student(n) * error for error, n in pairs[:, 2:]]) if metric == EVALUATION else None
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{config_file} holds no settings")
    return Run(folder, config, pairs[:, 0], pairs[:, 1], half_widths, _actions(folder))


def _actions(folder: Path) -> dict[str, str]:
    """What `meta.json` says of them; {} in runs of earlier versions."""
    try:
        found = json.loads((folder / "meta.json").read_text()).get("actions")
    except (OSError, ValueError, AttributeError):
        return {}
    return {str(leg): str(how) for leg, how in found.items()} if isinstance(found, dict) else {}


def group_runs(
    runs: Sequence[Run], group: str | Sequence[str] = "auto", aggregate: Aggregate = "mean"
) -> dict[str, list[Curve]]:
    """Curves by environment. Runs of a group share the environment and the settings named by `group`."""
    panels: dict[str, list[Run]] = {}
    for run in runs:
        panels.setdefault(str(run.config.get("env", "")), []).append(run)
    if group == "auto":
        by_env = [differing([run.config for run in members]) for members in panels.values()]
        names = list(dict.fromkeys(name for found in by_env for name in found))
    else:
        names = [name.strip() for name in (group.split(",") if isinstance(group, str) else group)]
        settings = list(dict.fromkeys(key for run in runs for key in run.config))
        unknown = [name for name in names if name not in settings]
        if unknown:
            raise ValueError(f"group by {unknown[0]!r}: no such setting in these runs; they have {', '.join(settings)}")
        if "core" in names and "policy" not in names and any(run.config.get("policy") is not None for run in runs):
            names.insert(names.index("core"), "policy")  # a policy of the user's own has another network
    return {env: _curves(members, names, aggregate, group == "auto") for env, members in panels.items()}


def _curves(runs: list[Run], names: list[str], aggregate: Aggregate, automatic: bool) -> list[Curve]:
    """A curve per group of one environment."""
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        members.setdefault(values(run.config, names), []).append(run)
    lines = labels([_common(group) for group in members.values()], None if automatic else names)
    return [Curve(label, group, aggregate) for label, group in zip(lines, members.values())]


def _common(group: list[Run]) -> Mapping[str, Any]:
    """The settings of a group; its name only if all its runs were given it."""
    named = {given_name(run.config) for run in group}
    return group[0].config if len(named) == 1 else {**group[0].config, "name": None}


def _draw_panel(axes: Any, env: str, curves: list[Curve], metric: str, title: str) -> None:
    for number, curve in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        if len(curve.runs) > 1:
            for run in curve.runs:
                axes.plot(run.steps, run.values, color=color, linewidth=0.6, alpha=0.35)
        if curve.interval is not None:
            axes.fill_between(curve.steps, *curve.interval, color=color, alpha=0.15, linewidth=0)
        gap = GRID_POINTS // _POINTS_WITH_MARKERS
        only = curve.runs[0]
        at_points = len(curve.runs) == 1 and only.half_widths is not None
        if at_points:
            axes.errorbar(only.steps, only.values, only.half_widths, fmt="none", color=color, linewidth=1, capsize=2)
        axes.plot(
            only.steps if at_points else curve.steps,
            only.values if at_points else curve.mean,
            color=color,
            linewidth=1.8,
            linestyle=_DASHES[number % len(_DASHES)],
            marker=_MARKERS[number % len(_MARKERS)] if len(curves) > 1 else None,
            markersize=5,
            markevery=1 if at_points else (number * gap // max(1, len(curves)), gap),  # not on top of each other
            label=_legend_text(curve, curves),
        )
    _draw_known_returns(axes, env, metric)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("environment steps")
    axes.set_ylabel(_quantity(metric, curves))
    axes.xaxis.set_major_formatter(lambda steps, _: compact(steps))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        place: dict[str, Any] = dict(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=_columns(curves))
        axes.legend(frameon=False, fontsize=9, handlelength=3.5, **place)


def _quantity(metric: str, curves: list[Curve]) -> str:
    """What the y axis shows. Where two lines show training and evaluation, the legend says which is which."""
    if metric not in (TRAINING, EVALUATION):
        return metric
    runs = [run for curve in curves for run in curve.runs]
    if metric == TRAINING and (curves[-1].runs[0].half_widths is not None or not any(run.actions for run in runs)):
        return "mean return"
    return f"mean return ({_which(metric, runs)})"


def _legend_text(curve: Curve, curves: list[Curve]) -> str:
    """The group; the number of its runs only if that differs too."""
    same = len({_num_runs_and_seeds(each) for each in curves}) == 1
    return curve.label if same else f"{curve.label} ({_seeds(curve)})"


def _num_runs_and_seeds(curve: Curve) -> tuple[int, int]:
    return len(curve.runs), len({str(run.config.get("seed", run.folder)) for run in curve.runs})


def _seeds(curve: Curve) -> str:
    runs, seeds = _num_runs_and_seeds(curve)
    if runs == 1:
        return f"seed {curve.runs[0].config.get('seed', '?')}"
    return f"{seeds} seeds" if seeds == runs else f"{runs} runs of {seeds} seed{'s' if seeds > 1 else ''}"


def _title(env: str, curves: list[Curve]) -> str:
    """The environment, what a line is if there is only one, and what the bands are."""
    title = env.removeprefix("holdfast/")
    counts = {len(curve.runs) for curve in curves}
    if len(curves) == 1:
        title += f", {curves[0].label}, {_seeds(curves[0])}"
    elif len({_seeds(curve) for curve in curves}) == 1:
        title += f", {_seeds(curves[0])}"
    if counts == {1}:
        return title
    if all(curve.is_range for curve in curves):
        return f"{title}\nmean, range"
    middle = "interquartile mean" if curves[0].aggregate == "iqm" else "mean"
    ranges = sorted({len(curve.runs) for curve in curves if curve.is_range} - {1})
    few = f", range of {' or '.join(map(str, ranges))} runs" if ranges else ""
    return f"{title}\n{middle}, 95% interval{few}"


def _draw_known_returns(axes: Any, env: str, metric: str) -> None:
    """Dotted lines at the returns of chance and of a perfect policy, if the environment comes with Holdfast."""
    from holdfast.envs.catalog import list_envs

    if metric not in (TRAINING, EVALUATION):
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
