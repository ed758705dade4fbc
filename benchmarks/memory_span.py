"""How far back does each memory recall? Steps of training until the mean return of the last 100 episodes is 0.95.

    python benchmarks/memory_span.py --seeds 11                             # what is not done yet
    python benchmarks/memory_span.py --task recall --spans 4 16 64 --seeds 11    # about 250 CPU-seconds
    python benchmarks/memory_span.py --seeds 11 12 13 --jobs 16 --seconds 900
    python benchmarks/memory_span.py --task recall --cores window lru --spans 16 64 --seeds 1
    python benchmarks/memory_span.py --report                               # table and plot of what is done

Two tasks. `recall` is RepeatPrevious: name what was seen k steps ago, at every step (k: 4 to 256). `maze` is TMaze: one sign
at the start decides a turn at the end of a corridor (20 to 500 steps). A core is told the span (`memory_span`): gates
start out open for as long, and a window has that length. All other settings are the same for all cores. A cell ends at the
threshold or at its limit of steps (`step_limit`), and is one line of benchmarks/results/memory_span.jsonl. Lines that are
there are not run again, so that an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from this_commit import this_commit

import holdfast as hf
from holdfast.cores.named import CORES

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "memory_span.jsonl"
PLOT = HERE.parent / "docs" / "memory_span.png"
SPANS = {"recall": (4, 16, 64, 256), "maze": (20, 50, 100, 200, 500)}
THRESHOLD = 0.95
TITLES = {"recall": "RepeatPrevious: what was seen k steps ago", "maze": "TMaze: a sign at the start of a corridor"}
STEP_TICKS = [factor * 10**power for power in range(4, 8) for factor in (1, 2, 5)]
MARKERS = "osD^v<P"
CARDS_PER_DECK = 52


class Cell(NamedTuple):
    """One run."""

    task: str
    core: str
    span: int
    seed: int


LONGEST = {"recall": {}, "maze": {"lstm": 200, "gru": 200, "lru": 100, "ffm": 100, "window": 100}}
"""The longest spans of a whole grid, where not all are tried: a linear memory stayed at chance in a corridor of 200 for a million
steps, and a window of three times that would cost too much. --spans asks for others."""
CPU_SECONDS = {"lstm": 22, "gru": 20, "mingru": 21, "lru": 52, "ffm": 95, "mlstm": 84, "window": 78}
"""Of a million steps of recall 64, on one core. The maze costs twice as much."""


def config_of(task: str, core: str, span: int, seed: int, max_steps: int) -> hf.TrainConfig:
    """The same settings for all cores; only the length of segments follows the span."""
    common: dict[str, Any] = dict(
        core=core, seed=seed, total_steps=max_steps, stop_at=THRESHOLD, threads=1, quiet=True, tensorboard=False,
        checkpoint_every=0, device="cpu",
    )  # fmt: skip
    if task == "recall":
        decks = -(-5 * span // (2 * CARDS_PER_DECK))  # k is 40% of an episode, as in POPGym's hard task, or less
        return hf.TrainConfig(
            env="holdfast/RepeatPreviousHard-v0", env_kwargs={"k": span, "num_decks": decks}, memory_span=span,
            hidden_size=64, num_envs=64, num_steps=max(128, 2 * span), minibatches=4, learning_rate=2e-3,
            lr_schedule="constant", gamma=0.3, gae_lambda=0.9, entropy_coef=0.003, **common,
        )  # fmt: skip
    return hf.TrainConfig.preset(
        "t-maze-200", env_kwargs={"length": span}, memory_span=3 * span, num_steps=max(128, 5 * span),
        lr_schedule="constant", entropy_schedule="constant", **common,
    )  # fmt: skip


def step_limit(cell: Cell) -> int:
    """Steps after which a run that is below the threshold is ended."""
    if cell.task == "maze":
        return 2_000_000 if cell.span > 100 else 1_000_000
    return 1_000_000 if cell.span > 64 else 500_000


def seconds_expected(cell: Cell, steps: int) -> float:
    """CPU-seconds of a run that takes so many steps, about; the longest cells start first."""
    factor = 2.0 if cell.task == "maze" else 1.0
    return CPU_SECONDS[cell.core] * factor * (1 + cell.span / 256) * steps / 1e6


class FirstUpdateAtThreshold(hf.Callback):
    """Steps and CPU-seconds up to the first update at which the recent returns are at the threshold."""

    def __init__(self) -> None:
        self.began, self.steps, self.cpu_seconds = time.process_time(), None, None  # type: ignore[var-annotated]

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
        if self.steps is None and row.get("rollout/ep_rew_mean", -np.inf) >= THRESHOLD:
            self.steps, self.cpu_seconds = int(row["steps"]), time.process_time() - self.began


def run_cell(cell: Cell, max_steps: int) -> dict[str, Any]:
    config = config_of(*cell, max_steps)
    watch = FirstUpdateAtThreshold()
    with tempfile.TemporaryDirectory() as folder:
        config.run_dir = folder + "/run"
        result = hf.Trainer(config, callbacks=[watch]).run()
    return {
        **cell._asdict(), "max_steps": max_steps, "threshold": THRESHOLD,
        "steps_to_threshold": watch.steps, "cpu_seconds_to_threshold": watch.cpu_seconds, "steps": result.steps,
        "mean_return": result.mean_return, "cpu_seconds": time.process_time() - watch.began,
        "version": hf.__version__, "commit": this_commit(),
    }  # fmt: skip


# --- many cells, each in a process of its own -------------------------------------------------------------------------


def finished(path: Path) -> dict[Cell, dict[str, Any]]:
    """What is done. Of a cell that was run again, with more steps, the last line."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {Cell(*(row[name] for name in Cell._fields)): row for row in rows}


def is_done(row: dict[str, Any] | None, max_steps: int) -> bool:
    """At the threshold, or as many steps as it may take."""
    return row is not None and (row["steps_to_threshold"] is not None or row["max_steps"] >= max_steps)


def to_do(args: argparse.Namespace) -> list[tuple[Cell, int]]:
    """The cells that are asked for and not done, with their limits; seed by seed, the longest first."""
    done = finished(args.out)
    cells = [
        Cell(task, core, span, seed)
        for seed in args.seeds
        for task in ([args.task] if args.task else SPANS)
        for span in args.spans or SPANS[task]
        for core in args.cores
        if args.spans or span <= LONGEST[task].get(core, span)
    ]
    jobs = [(cell, args.max_steps or step_limit(cell)) for cell in cells]
    jobs = [(cell, steps) for cell, steps in jobs if not is_done(done.get(cell), steps)]
    return sorted(jobs, key=lambda job: (args.seeds.index(job[0].seed), -seconds_expected(*job)))


def run_and_keep(cell: Cell, max_steps: int, path: Path, deadline: float) -> None:
    """Add one line to the results. A run that is not done at the deadline leaves none."""
    left = deadline - time.monotonic()
    if left < 1:
        return
    command = [sys.executable, __file__, "--one", json.dumps([*cell, max_steps])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    name = f"{cell.task} {cell.span}, {cell.core}, seed {cell.seed}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=left if left < 1e9 else None)
    except subprocess.TimeoutExpired:
        print(f"{name}: not done in time", flush=True)
        return
    if done.returncode:
        print(f"{name}: failed\n{done.stderr.strip()[-600:]}", flush=True)
        return
    line = done.stdout.strip().splitlines()[-1]
    with path.open("a") as file:
        file.write(line + "\n")
    row = json.loads(line)
    print(f"{name}: {entry([row])}, {row['cpu_seconds']:.0f} CPU-s", flush=True)


# --- report -----------------------------------------------------------------------------------------------------------


def entry(cells: list[dict[str, Any]]) -> str:
    """Median steps to the threshold, and how many seeds got there."""
    if not cells:
        return ""
    reached = [cell["steps_to_threshold"] for cell in cells if cell["steps_to_threshold"] is not None]
    best = max(cell["mean_return"] for cell in cells)
    if not reached:
        return f"{best:.2f} at {max(cell['steps'] for cell in cells) / 1e6:.2f}M"
    some = f" ({len(reached)} of {len(cells)})" if len(reached) < len(cells) else ""
    return f"**{np.median(reached) / 1e6:.2f}M**{some}"


def table(cells: list[dict[str, Any]]) -> str:
    """One table per task: cores by spans. Bold: steps to the threshold; otherwise the final return."""
    parts = []
    for task in SPANS:
        mine = [cell for cell in cells if cell["task"] == task]
        if not mine:
            continue
        spans = sorted({cell["span"] for cell in mine})
        cores = [core for core in CORES if any(cell["core"] == core for cell in mine)]
        lines = [f"| {task} | " + " | ".join(map(str, spans)) + " |", "|---" * (len(spans) + 1) + "|"]
        for core in cores:
            row = [entry([c for c in mine if c["core"] == core and c["span"] == span]) for span in spans]
            lines.append(f"| {core} | " + " | ".join(row) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def plot(cells: list[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    tasks = [task for task in SPANS if any(cell["task"] == task for cell in cells)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False)
    for axis, task in zip(axes[0], tasks):
        axis.set(xscale="log", yscale="log", title=TITLES[task], xlabel="steps to remember")
        axis.set_ylabel(f"steps to a return of {THRESHOLD} (hollow: not reached)")
        for core in CORES:
            mine = [cell for cell in cells if cell["task"] == task and cell["core"] == core]
            if not mine:
                continue
            done = [cell for cell in mine if cell["steps_to_threshold"] is not None]
            failed = [cell for cell in mine if cell["steps_to_threshold"] is None]
            spans = sorted({cell["span"] for cell in done})
            medians = [np.median([c["steps_to_threshold"] for c in done if c["span"] == span]) for span in spans]
            number = list(CORES).index(core)
            beside = 1.05 ** (number - len(CORES) // 2)  # points of several cores would cover each other
            style = dict(marker=MARKERS[number], color=f"C{number}", ms=6)
            axis.plot([span * beside for span in spans], medians, label=core, **style)
            axis.plot(
                [c["span"] * beside for c in failed],
                [c["steps"] for c in failed],
                ls="",
                mfc="none",
                alpha=0.6,
                **style,
            )
        axis.set_xticks(sorted({cell["span"] for cell in cells if cell["task"] == task}))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axis.get_ylim()
        axis.set_yticks([steps for steps in STEP_TICKS if low <= steps <= high])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g}M"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def report(path: Path) -> None:
    rows = list(finished(path).values())
    if not rows:
        raise SystemExit(f"{path}: no cell is done yet; run without --report first")
    text = table(rows)
    print(text)
    path.with_suffix(".md").write_text(
        "# How far back each memory recalls\n\nMade by `python benchmarks/memory_span.py`. Bold: environment steps until the mean "
        "return of the last 100 training episodes is 0.95, median over seeds. Otherwise: the final return, and after how "
        f"many steps the run was ended.\n\n{text}\n"
    )
    plot(rows, PLOT if path == RESULTS else path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(SPANS), help="recall or maze; both by default")
    parser.add_argument("--cores", nargs="+", choices=tuple(CORES), default=tuple(CORES), help="all by default")
    parser.add_argument("--spans", nargs="+", type=int, help="steps to remember; the whole range by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12, 13])
    parser.add_argument("--max-steps", type=int, help="instead of each cell's own limit")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, one thread each")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="end what is not done by then; run again to go on"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="results, one line per cell")
    parser.add_argument("--list", action="store_true", help="train nothing; print the cells that are not done")
    parser.add_argument("--report", action="store_true", help="train nothing; write table and plot")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        *cell, max_steps = json.loads(args.one)
        torch.set_num_threads(1)
        print(json.dumps(run_cell(Cell(*cell), max_steps)))
        return
    if not args.report:
        deadline = time.monotonic() + args.seconds
        args.out.parent.mkdir(parents=True, exist_ok=True)
        jobs = to_do(args)
        if args.list:
            print(
                "\n".join(
                    f"{cell.task} {cell.span}, {cell.core}, seed {cell.seed}: {steps / 1e6:.2f}M"
                    for cell, steps in jobs
                )
            )
            return
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda job: run_and_keep(*job, args.out, deadline), jobs))
    report(args.out)


if __name__ == "__main__":
    main()
