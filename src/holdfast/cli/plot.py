"""`holdfast plot RUN ...`: learning curves of runs, or of a bench, as a PNG, PDF or SVG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.flags import parse
from holdfast.shown_text import show


@dataclass
class PlotFlags:
    """Draw learning curves: mean and 95% interval over seeds (of two seeds their range), a panel per environment."""

    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ...")]
    """Run folders, folders of run folders, or the results.jsonl of a bench."""
    out: Annotated[Path, tyro.conf.arg(aliases=("-o",))] = Path("curves.png")
    """The picture to write; its name says the format, such as .png, .pdf or .svg."""
    metric: str = "auto"
    """A column of progress.csv; auto: the return of training episodes and of evaluations."""
    group: str = "auto"
    """Settings that make a group, such as core or core,hidden_size; auto takes those that differ."""
    aggregate: Literal["mean", "iqm"] = "mean"
    """Over seeds: the mean with Student's interval, or the interquartile mean with a bootstrap interval."""


def main(argv: list[str]) -> int:
    flags = parse(PlotFlags, argv, "plot")
    from holdfast.display.plot import plot_runs
    from holdfast.runs import pretrained

    results = [path for path in flags.runs if path.suffix == ".jsonl"]
    if results and (len(results) < len(flags.runs) or flags.metric != "auto"):
        raise UserError(f"{results[0]} holds results of a bench: draw it without run folders and without --metric")
    with user_errors(flags.out):
        if results:
            from holdfast.bench.figures import plot_results

            show(plot_results(results, flags.out, flags.group, flags.aggregate))
            return 0
        # A glob such as runs/TMaze-v0/* also matches plots that were drawn earlier: other files are left out.
        folders = [path for path in flags.runs if path.is_dir() or not path.exists()]
        runs = [run for folder in folders for run in _runs_in(folder) or [folder]]
        if len(runs) == 1:  # of several, plot_runs leaves out what is no run, and says so
            pretrained.require_run(runs[0])
        show(plot_runs(runs, flags.out, metric=flags.metric, group=flags.group, aggregate=flags.aggregate, notify=show))
    return 0


def _runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs below it."""
    from holdfast.runs.log import CSV_NAME

    if (folder / CSV_NAME).exists():
        return [folder]
    return sorted(path.parent for path in folder.rglob(CSV_NAME))
