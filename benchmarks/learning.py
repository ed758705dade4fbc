"""How reliably is each preset solved? Ten fresh seeds with its own core, and three without memory where the task needs one.

    python benchmarks/learning.py --processes 2                 # what is not done yet, one thread per run; then the report
    python benchmarks/learning.py --only t-maze cartpole --seeds 201 202
    python benchmarks/learning.py --list                        # what is left, and what it costs
    python benchmarks/learning.py --report                      # table and plot of what is done

A run is solved if the mean return of 100 fresh episodes with sampled actions, played after training, is at least the preset's
`solved_at`: gymnasium's own reward threshold where it registers one, -250 for Pendulum, 0.5 for HigherLower, and 0.95 for the
other memory tasks, in which 1 is perfect. No preset was tuned on the seeds from 201 on.

Each run is a line of benchmarks/results/learning.jsonl with the settings of the preset. A line of this preset with these
settings is not run again; lines of other settings do not count.

The presets of LunarLander need Box2D: pip install 'holdfast[box2d]'
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from threading import Lock, Thread
from typing import Any, NamedTuple

from this_commit import this_commit

from holdfast.config import PRESETS, TrainConfig

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "learning.jsonl"
PAGE, PLOT = HERE.parent / "docs" / "learning.md", HERE.parent / "docs" / "learning.png"
BEGIN, END = "<!-- table: benchmarks/learning.py --report writes what follows -->\n", "<!-- end of the table -->\n"
SEEDS, CONTROLS = 10, 3
POINTS_OF_A_CURVE = 40


class Goal(NamedTuple):
    """What a preset is asked to do, and what a run costs."""

    solved_at: float
    seconds: float
    """On one core of an AMD EPYC 9575F; the cheapest start first."""
    needs_memory: bool = True
    first_seed: int = 201
    """A preset that is changed after it was run gets other seeds."""


GOALS: dict[str, Goal] = {
    "repeat-previous-easy": Goal(0.95, 10),
    "repeat-previous-medium": Goal(0.95, 25),
    "repeat-previous-hard": Goal(0.95, 40),
    "repeat-first-easy": Goal(0.95, 15),
    "position-only-cartpole-easy": Goal(0.95, 90, first_seed=211),
    "t-maze": Goal(0.95, 30, first_seed=211),
    "t-maze-200": Goal(0.95, 70, first_seed=211),
    "higher-lower-easy": Goal(0.5, 35),
    "cartpole": Goal(475, 90, needs_memory=False, first_seed=211),
    "cartpole-masked": Goal(475, 90, first_seed=211),
    "acrobot": Goal(-100, 40, needs_memory=False),
    "acrobot-masked": Goal(-100, 40),
    "pendulum": Goal(-250, 40, needs_memory=False, first_seed=211),
    "pendulum-masked": Goal(-250, 40, first_seed=211),
    "mountain-car-continuous": Goal(90, 80, needs_memory=False),
    "mountain-car-continuous-masked": Goal(90, 80),
    "lunar-lander": Goal(200, 200, needs_memory=False),
    "lunar-lander-masked": Goal(200, 200),
}


class Run(NamedTuple):
    """One training run."""

    preset: str
    core: str
    seed: int

    def __str__(self) -> str:
        return f"{self.preset}, {self.core}, seed {self.seed}"


def core_of(preset: str) -> str:
    return str(TrainConfig.preset(preset).core)


def wanted() -> list[Run]:
    """Seed by seed, so that every preset has its first seeds early; the cheapest first."""
    runs = []
    for number in range(SEEDS):
        for preset, goal in sorted(GOALS.items(), key=lambda item: item[1].seconds):
            cores = [core_of(preset), *(["none"] if goal.needs_memory and number < CONTROLS else [])]
            runs += [Run(preset, core, goal.first_seed + number) for core in cores]
    return runs


# --- one run, in a process of its own ---------------------------------------------------------------------------------


def train(run: Run) -> dict[str, Any]:
    import torch

    import holdfast as hf

    class Watch(hf.Callback):
        """The learning curve, and when the mean return of the last 100 episodes first reaches the goal."""

        only_watches = True

        def __init__(self) -> None:
            self.curve: list[tuple[int, float]] = []
            self.steps_to_threshold: int | None = None

        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
            steps, mean = int(row["steps"]), row["rollout/ep_rew_mean"]
            if math.isfinite(mean):
                self.curve.append((steps, float(f"{mean:.4g}")))
            if self.steps_to_threshold is None and len(trainer.progress.recent_returns) == 100:
                self.steps_to_threshold = steps if mean >= GOALS[run.preset].solved_at else None

    torch.set_num_threads(1)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig.preset(
            run.preset, core=run.core, seed=run.seed, device="cpu", threads=1, run_dir=f"{folder}/run", quiet=True,
            tensorboard=False, checkpoint_every=0,
        )  # fmt: skip
        result = hf.Trainer(config, callbacks=[watch]).run()
    every = -(-len(watch.curve) // POINTS_OF_A_CURVE)
    return {
        **run._asdict(), "solved_at": GOALS[run.preset].solved_at, "mean_return": result.mean_return, "steps": result.steps, "steps_to_threshold": watch.steps_to_threshold,
        "seconds": round(result.seconds, 1), "commit": this_commit(), "settings": PRESETS[run.preset],
        "curve": watch.curve[::-1][::every][::-1],
    }  # fmt: skip


# --- many runs --------------------------------------------------------------------------------------------------------


def finished(path: Path) -> dict[Run, dict[str, Any]]:
    """The runs of today's presets; the last line of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {
        Run(row["preset"], row["core"], row["seed"]): row
        for row in rows
        if row["settings"] == json.loads(json.dumps(PRESETS.get(row["preset"])))
    }


class Queue:
    """Runs that are left. A thread takes the first one that ends in time."""

    def __init__(self, runs: list[Run], output: Path, stop_after: float) -> None:
        self.runs, self.output, self.deadline = runs, output, time.monotonic() + stop_after
        self.failed: list[Run] = []
        self.lock = Lock()

    def take(self) -> Run | None:
        with self.lock:
            left = self.deadline - time.monotonic()
            run = next((run for run in self.runs if GOALS[run.preset].seconds <= left), None)
            if run:
                self.runs.remove(run)
            return run

    def work(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        while run := self.take():
            command = [sys.executable, __file__, "--one", json.dumps(run)]
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            with self.lock:
                if done.returncode:
                    self.failed.append(run)
                    print(f"{run}: failed\n{done.stderr.strip()[-600:]}", flush=True)
                    continue
                line = done.stdout.strip().splitlines()[-1]
                with self.output.open("a") as file:
                    file.write(line + "\n")
                row = json.loads(line)
                print(f"{run}: {row['mean_return']:.4g}, {row['seconds']:.0f} s", flush=True)


def run_all(runs: list[Run], output: Path, processes: int, stop_after: float) -> None:
    queue = Queue(runs, output, stop_after)
    threads = [Thread(target=queue.work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if queue.failed:
        raise SystemExit(f"{len(queue.failed)} runs failed: {'; '.join(map(str, queue.failed))}")


# --- report -----------------------------------------------------------------------------------------------------------


def table(rows: dict[Run, dict[str, Any]]) -> str:
    """A line per preset: how many of its seeds are solved, and by how much."""
    lines = [
        "| preset | core | solved at | solved on | mean | lowest | each seed | steps | median steps until solved | no memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for preset, goal in GOALS.items():
        digits = 3 if abs(goal.solved_at) <= 1 else 1
        own = [row for run, row in rows.items() if run.preset == preset and run.core != "none"]
        control = [row["mean_return"] for run, row in rows.items() if run.preset == preset and run.core == "none"]
        without = f"{fmean(control):.{digits}f}" if control else ""
        if not own:
            lines.append(f"| {preset} | {core_of(preset)} | {goal.solved_at:g} | not run | | | | | | {without} |")
            continue
        own.sort(key=lambda row: row["seed"])
        returns = [row["mean_return"] for row in own]
        each = ", ".join(f"{value:.{digits}f}" for value in returns)
        solved = sum(value >= goal.solved_at for value in returns)
        reached = sorted(row["steps_to_threshold"] or math.inf for row in own)
        until = median(reached)
        lines.append(
            f"| {preset} | {core_of(preset)} | {goal.solved_at:g} | {solved} of {len(own)} | {fmean(returns):.{digits}f} "
            f"| {min(returns):.{digits}f} | {each} | {median(row['steps'] for row in own):,.0f} "
            f"| {f'{until:,.0f}' if math.isfinite(until) else 'not reached'} | {without} |"
        )
    return "\n".join(lines) + "\n"


def with_table(page: str, new: str) -> str:
    """The page, with another table between its two comments."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} lacks the comments around its table")
    return f"{before}{begin}\n{new}\n{end}{after}"


def plot(rows: dict[Run, dict[str, Any]], path: Path) -> None:
    """A panel per preset: the training returns of every run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 4
    figure, axes = pyplot.subplots(-(-len(GOALS) // columns), columns, figsize=(14, 14), constrained_layout=True)
    panels = dict(zip(GOALS, axes.flat))
    for (preset, core, _), row in sorted(rows.items(), key=lambda item: item[0].core == "none"):
        color, label = ("#b4462a", "no memory") if core == "none" else ("#1f6fb4", "the preset's core")
        steps, returns = zip(*row["curve"])
        panels[preset].plot([step / 1e3 for step in steps], returns, color=color, alpha=0.7, linewidth=1.2, label=label)
    for preset, panel in panels.items():
        panel.axhline(GOALS[preset].solved_at, color="0.5", linewidth=0.8, linestyle=":", label="solved")
        panel.set_title(f"{preset} ({core_of(preset)})", fontsize=9)
        panel.tick_params(labelsize=8)
    for panel in axes[-1]:
        panel.set_xlabel("thousand steps", fontsize=8)
    for panel in list(axes.flat)[len(GOALS) :]:
        panel.axis("off")
    shown: dict[str, Any] = {}
    for panel in panels.values():
        handles, labels = panel.get_legend_handles_labels()
        shown.update(zip(labels, handles))
    axes.flat[-1].legend(shown.values(), shown.keys(), loc="center", frameon=False)
    figure.supylabel("mean return of the last 100 training episodes", fontsize=9)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(GOALS), metavar="PRESET", default=list(GOALS))
    parser.add_argument("--seeds", nargs="+", type=int, help="only these; all by default")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS", help="start no run that takes longer than what is left")  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="print what is left and run nothing")
    parser.add_argument("--report", action="store_true", help="run nothing; write the table and the plot into docs/")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(train(Run(*json.loads(args.one)))))
        return
    rows = finished(args.output)
    left = [run for run in wanted() if run not in rows and run.preset in args.only]
    left = [run for run in left if not args.seeds or run.seed in args.seeds]
    if args.list:
        print("\n".join(f"{run}: {GOALS[run.preset].seconds:.0f} s" for run in left))
        return
    if not args.report:
        run_all(left, args.output, args.processes, args.stop_after)
        rows = finished(args.output)
    print(table(rows))
    if args.report:
        PAGE.write_text(with_table(PAGE.read_text(), table(rows)))
        plot(rows, PLOT)


if __name__ == "__main__":
    main()
