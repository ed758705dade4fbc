"""What the default settings reach: a suite of tasks, no flag but `--env`, `--core`, `--mask-velocity` and `--total-steps`.

    python benchmarks/out_of_the_box.py                              # the whole suite: GRU and LSTM, 5 seeds each
    python benchmarks/out_of_the_box.py --tasks CartPole TMaze --cores gru --seeds 101 102 --jobs 2
    python benchmarks/out_of_the_box.py --cores none --seeds 101 102       # the memoryless control
    python benchmarks/out_of_the_box.py --report benchmarks/results/out_of_the_box.jsonl --plot docs/out_of_the_box.png --page docs/training.md

Each run is a process on one thread. Its result is the mean return of 100 fresh episodes, with sampled actions and with the most
likely ones. Finished runs are lines of the JSON file and are not run again. `--variant NAME field=value ...` runs the suite with
other settings than the defaults, to compare; the table says so.

The tasks marked "held out" were not used when the defaults were chosen, and neither were the seeds from 101 on.
LunarLander needs Box2D: pip install 'holdfast[box2d]'
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "out_of_the_box.jsonl"


@dataclass(frozen=True)
class Task:
    """One row of the table. target: the return the defaults are to reach; random: a policy that acts at random."""

    env: str
    steps: int
    target: float | None = None
    random: float | None = None
    mask_velocity: bool = False
    cores: tuple[str, ...] = ("gru", "lstm")
    published: str = ""
    held_out: bool = False


ZOO = "rl-zoo's tuned ppo_lstm"
TASKS: dict[str, Task] = {
    "CartPole": Task("CartPole-v1", 100_000, 475, 22, True, published=f"500 ({ZOO})"),
    "Pendulum": Task("Pendulum-v1", 100_000, -250, -1220, True, published=f"-217.9 +- 140 ({ZOO})"),
    "Pendulum 300k": Task("Pendulum-v1", 300_000, -200, -1220, True, published=f"-217.9 +- 140 ({ZOO})"),
    "Acrobot": Task("Acrobot-v1", 100_000, -95, -499, True),
    "MountainCarContinuous": Task("MountainCarContinuous-v0", 300_000, 85, -33, True, published=f"91.5 ({ZOO})"),
    "LunarLander": Task("LunarLander-v3", 1_000_000, 150, -180, True),
    "CartPole, all observed": Task("CartPole-v1", 100_000, 490, 22, False, ("none",)),
    "RepeatFirstEasy": Task("holdfast/RepeatFirstEasy-v0", 1_000_000, 0.95, -0.5, published="1.000 (POPGym GRU, 15M)"),
    "RepeatPreviousEasy": Task("holdfast/RepeatPreviousEasy-v0", 1_000_000, 0.95, -0.5, published="1.000 (POPGym GRU, 15M)"),
    "PositionOnlyCartPoleEasy": Task("holdfast/PositionOnlyCartPoleEasy-v0", 1_000_000, 0.95, 0.11, published="1.000 (POPGym GRU, 15M)"),
    "NoisyPositionOnlyCartPoleEasy": Task("holdfast/NoisyPositionOnlyCartPoleEasy-v0", 1_000_000, 0.95, 0.11, published="0.995 (POPGym GRU, 15M)"),
    "RepeatFirstMedium": Task("holdfast/RepeatFirstMedium-v0", 2_000_000, 0.95, -0.5, published="1.000 (POPGym GRU, 15M)"),
    "HigherLowerEasy": Task("holdfast/HigherLowerEasy-v0", 2_000_000, 0.5, 0.0, published="0.529 (POPGym GRU, 15M)"),
    "MultiarmedBanditEasy": Task("holdfast/MultiarmedBanditEasy-v0", 2_000_000, 0.6, 0.0, published="0.619 (POPGym GRU, 15M)"),
    "TMaze": Task("holdfast/TMaze-v0", 1_000_000, 0.95, 0.05),
    "VelocityOnlyCartPoleEasy": Task("holdfast/VelocityOnlyCartPoleEasy-v0", 1_000_000, None, 0.11, held_out=True),
    "PositionOnlyPendulumEasy": Task("holdfast/PositionOnlyPendulumEasy-v0", 1_000_000, None, 0.244, held_out=True),
    "AutoencodeEasy": Task("holdfast/AutoencodeEasy-v0", 1_000_000, None, -0.5, published="-0.283 (POPGym GRU, 15M)", held_out=True),
}  # fmt: skip


# --- one run, in a process of its own ---------------------------------------------------------------------------------


def run_one(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from this_commit import this_commit

    torch.set_num_threads(1)
    import holdfast as hf
    from holdfast.envs.bridge import make
    from holdfast.training.evaluation import evaluate

    task = TASKS[job["task"]]
    settings = dict(job.get("settings", {}))
    steps = settings.pop("total_steps", task.steps)
    with tempfile.TemporaryDirectory() as folder:
        config = hf.TrainConfig(
            env=task.env, core=job["core"], mask_velocity=task.mask_velocity, total_steps=steps, seed=job["seed"], device=job["device"],
            run_dir=str(Path(folder) / "run"), quiet=True, tensorboard=False, checkpoint_every=0, threads=1, **settings,
        )  # fmt: skip
        trainer = hf.Trainer(config)
        began = time.perf_counter()
        result = trainer.run()
        seconds = time.perf_counter() - began
        curve = [[row["steps"], row["rollout/ep_rew_mean"]] for row in read_rows(Path(folder) / "run" / "progress.csv")]
        env = make(task.env, 10, mask_velocity=task.mask_velocity)
        greedy = evaluate(
            trainer.policy, env, 100, deterministic=True, seed=10_000 + job["seed"], inputs=trainer.config.inputs
        )
        every = max(1, len(curve) // 40)
        return {
            **job, "commit": this_commit(), "sampled": result.mean_return, "deterministic": greedy.mean_return, "steps": result.steps, "seconds": round(seconds, 1),
            "curve": [[int(float(s)), round(float(r), 4)] for s, r in curve[::every]],
        }  # fmt: skip


def read_rows(path: Path) -> list[dict[str, str]]:
    import csv

    with path.open() as file:
        return list(csv.DictReader(file))


# --- all of them ------------------------------------------------------------------------------------------------------


def run_job(job: dict[str, Any], out: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, "--one", json.dumps(job)], capture_output=True, text=True, env=env)
    lines = done.stdout.strip().splitlines()
    row = (
        json.loads(lines[-1])
        if done.returncode == 0 and lines
        else {**job, "error": (done.stderr or "no output").strip()[-600:]}
    )
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = f"{row['sampled']:.3f} ({row['deterministic']:.3f})" if "sampled" in row else row["error"].splitlines()[-1]
    print(f"{key(row)}: {shown}  {row.get('seconds', 0):.0f} s", flush=True)


def key(row: dict[str, Any]) -> str:
    return f"{row['variant'] or 'defaults'} / {row['task']} / {row['core']} / seed {row['seed']}"


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def in_groups(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """(variant, task, core) -> runs, in the order of the tasks."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "sampled" in row:
            groups.setdefault((row["variant"], row["task"], row["core"]), []).append(row)
    return dict(sorted(groups.items(), key=lambda g: (g[0][0], list(TASKS).index(g[0][1]), g[0][2])))


HEADER = "| task | core | steps | target | mean | each seed | deterministic | without memory | random | published |"


def report(rows: list[dict[str, Any]]) -> str:
    """A markdown table of what finished. Runs without memory are a column of their task's rows."""
    lines = [HEADER, "|" + "---|" * HEADER.count(" | ") + "---|"]
    groups = in_groups(rows)
    for (variant, name, core), runs in groups.items():
        task = TASKS[name]
        control = groups.get((variant, name, "none"), [])
        if core == "none" and "none" not in task.cores:
            continue
        cells = [
            name + (" (held out)" if task.held_out else "") + (f" [{variant}]" if variant else ""),
            core if core == "none" else core.upper(),
            f"{task.steps:,}",
            "" if task.target is None else str(task.target),
            mean_of(runs, "sampled"),
            ", ".join(f"{row['sampled']:.4g}" for row in sorted(runs, key=lambda row: row["seed"])),
            mean_of(runs, "deterministic"),
            mean_of(control, "sampled") if control and core != "none" else "",
            "" if task.random is None else str(task.random),
            task.published.partition(" (")[0],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_of(runs: list[dict[str, Any]], name: str) -> str:
    return f"{statistics.fmean(row[name] for row in runs):.4g}"


def write_into(page: Path, table: str) -> None:
    """Put the table in the place of the one that the page has."""
    before, after = page.read_text().split(HEADER, 1)
    page.write_text(before + table + "\n\n" + after.split("\n\n", 1)[1])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Every run as a mark, between a random policy (0) and the target or a published return (1)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = in_groups(rows)
    scales = {name: (task.random, goal) for name, task in TASKS.items() if (goal := _goal(task)) is not None}
    names = [name for name in scales if any(key[1] == name for key in groups)]
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(names) + 1.4), constrained_layout=True)
    marks = {"gru": ("o", 0.16, "#1f6fb4"), "lstm": ("s", -0.16, "#d9730d"), "none": ("x", 0.0, "#555555")}
    for (_, name, core), runs in groups.items():
        if name in scales and core in marks:
            low, goal = scales[name]
            shape, shift, color = marks[core]
            heights = [(row["sampled"] - low) / (goal - low) for row in runs]
            place = [len(names) - 1 - names.index(name) + shift] * len(runs)
            axes.plot(heights, place, shape, color=color, markersize=5, fillstyle="none", label=core)
    for where, text in ((0.0, "random"), (1.0, "target")):
        axes.axvline(where, color="0.6", linewidth=0.8)
        axes.text(where, 1.01, text, transform=axes.get_xaxis_transform(), ha="center", fontsize=8, color="0.35")
    axes.set_yticks(
        range(len(names)), [n + (" (held out)" if TASKS[n].held_out else "") for n in reversed(names)], fontsize=8
    )
    axes.set_xlabel("return with sampled actions; each mark is one seed")
    axes.set_ylim(-0.6, len(names) - 0.4)
    labels = dict(zip(axes.get_legend_handles_labels()[1], axes.get_legend_handles_labels()[0]))
    shown = {"gru": "GRU", "lstm": "LSTM", "none": "no memory"}
    axes.legend([labels[k] for k in shown if k in labels], [shown[k] for k in shown if k in labels], loc="center left",
                bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=130)


def _goal(task: Task) -> float | None:
    if task.target is not None:
        return task.target
    return float(task.published.split()[0]) if task.published else 1.0 if task.env.startswith("holdfast/") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", nargs="+", choices=list(TASKS), metavar="TASK", default=list(TASKS), help=", ".join(TASKS)
    )
    parser.add_argument("--cores", nargs="+", default=["gru", "lstm"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102, 103, 104, 105])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--variant",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "field=value"),
        help="settings other than the defaults",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", type=Path, help="print the table of these results and run nothing")
    parser.add_argument("--plot", type=Path, help="with --report: also draw this picture")
    parser.add_argument("--page", type=Path, help="with --report: also put the table into this page")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(json.loads(options.one))))
        return
    if options.report:
        table = report(read_results(options.report))
        print(table)
        if options.page:
            write_into(options.page, table)
        if options.plot:
            plot(read_results(options.report), options.plot)
        return
    variants = [
        (name, {k: parse_value(v) for k, v in (pair.split("=", 1) for pair in pairs)})
        for name, *pairs in options.variant
    ] or [("", {})]
    jobs = [
        {"variant": name, "settings": settings, "task": task, "core": core, "seed": seed, "device": options.device}
        for name, settings in variants
        for seed in options.seeds
        for task in options.tasks
        for core in (TASKS[task].cores if TASKS[task].cores == ("none",) else options.cores)
    ]
    finished = {key(row) for row in read_results(options.out) if "sampled" in row}
    jobs = [job for job in jobs if key(job) not in finished]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: run_job(job, options.out), jobs))
    print(report(read_results(options.out)))


if __name__ == "__main__":
    main()
