"""Evaluation during training, as it is by default: what it costs, and whether the end of the curve agrees with the result.

    python benchmarks/evaluation_share.py                                    # all tasks, five seeds each
    python benchmarks/evaluation_share.py --tasks Pendulum --seeds 101 102
    python benchmarks/evaluation_share.py --report                           # the table of what is there; runs nothing
    python benchmarks/evaluation_share.py --plot docs/evaluation.png         # the runs of Pendulum and Hopper

One process, one thread. `share` is the time of all evaluations during training, their environments included, as a part of the training
time. The last evaluation has other episodes than the result; both are of the last weights. Hopper needs MuJoCo: pip install
'gymnasium[mujoco]'.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "evaluation_share.jsonl"
TASKS: dict[str, dict[str, Any]] = {
    "Pendulum": dict(env="Pendulum-v1", core="gru", total_steps=100_000),
    "Hopper": dict(env="Hopper-v5", core="gru", total_steps=60_000),
    "CartPole": dict(env="CartPole-v1", core="gru", total_steps=100_000),
    "CartPole without memory": dict(env="CartPole-v1", core="none", total_steps=100_000),
    "RepeatPreviousEasy (make train)": {},
}


def run_one(task: str, seed: int) -> dict[str, Any]:
    from this_commit import this_commit

    import holdfast as hf

    with tempfile.TemporaryDirectory() as folder:
        common = dict(
            run_dir=f"{folder}/run",
            seed=seed,
            device="cpu",
            threads=1,
            quiet=True,
            tensorboard=False,
            checkpoint_every=0,
        )
        settings = {**TASKS[task], **common}
        preset = "repeat-previous-easy"
        trainer = hf.Trainer(hf.PPOConfig(**settings) if "env" in settings else hf.PPOConfig.preset(preset, **settings))
        spent, evaluate = [], trainer._evaluate_on_schedule  # private, and the only place

        def timed() -> Any:
            began = time.perf_counter()
            result = evaluate()
            spent.append(time.perf_counter() - began)
            return result

        trainer._evaluate_on_schedule = timed  # type: ignore[method-assign]
        result = trainer.run()
        rows = list(csv.DictReader((Path(folder) / "run" / "progress.csv").open()))
    names = ("steps", "eval/mean_return", "eval/std_error", "eval/episodes")
    every = max(1, len(rows) // 50)
    return {
        "task": task, "seed": seed, "commit": this_commit(), "command": " ".join(["python", *sys.argv]),
        "settings": TASKS[task], "actions": [trainer.algorithm.explores_with, trainer.algorithm.evaluates_with()],
        "share": sum(spent) / result.seconds, "seconds": round(result.seconds, 1),
        "result": result.mean_return, "result_error": result.std_error, "result_episodes": result.episodes,
        "evaluations": [[float(row[name]) for name in names] for row in rows if row["eval/mean_return"] != "nan"],
        "training": [[float(row["steps"]), float(row["rollout/ep_rew_mean"])] for row in rows[::-1][::every][::-1]],
    }  # fmt: skip


def last_and_result(row: dict[str, Any]) -> tuple[float, float, float, float]:
    """The last evaluation and the result, each with the half width of its 95% interval by Student's t."""
    from holdfast.display.plot import student

    _, last, error, episodes = row["evaluations"][-1]
    return last, student(episodes) * error, row["result"], student(row["result_episodes"]) * row["result_error"]


def report(rows: list[dict[str, Any]]) -> str:
    from statistics import fmean, stdev

    from holdfast.display.plot import student

    lines = [
        "| task | seeds | evaluations | share of the time: mean, largest | end of the training curve | last evaluation | result "
        "| intervals overlap | last evaluation - result |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        runs = [row for row in rows if row["task"] == task and row["evaluations"]]
        if not runs:
            continue
        pairs = [last_and_result(row) for row in runs]
        overlap = sum(abs(last - result) <= a + b for last, a, result, b in pairs)
        differences = [last - result for last, _, result, _ in pairs]
        half = student(len(runs)) * stdev(differences) / math.sqrt(len(runs)) if len(runs) > 1 else math.nan
        counts = sorted({len(row["evaluations"]) for row in runs})
        lines.append(
            f"| {task} | {len(runs)} | {' to '.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} "
            f"| {fmean(row['share'] for row in runs):.1%}, {max(row['share'] for row in runs):.1%} "
            f"| {fmean(row['training'][-1][1] for row in runs):.4g} | {fmean(last for last, *_ in pairs):.4g} "
            f"| {fmean(row['result'] for row in runs):.4g} | {overlap} of {len(runs)} "
            f"| {fmean(differences):.3g} ± {half:.2g} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], out: Path) -> None:
    import numpy as np

    from holdfast.display.figures import new_figure, save_figure

    tasks = [task for task in ("Pendulum", "Hopper") if any(row["task"] == task for row in rows)]
    figure = new_figure((5.5 * len(tasks), 4.2))
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        runs = [row for row in rows if row["task"] == task]
        for number, row in enumerate(runs):
            curve, points = np.array(row["training"]), np.array(row["evaluations"])
            labels = [f"{name}, {how}" for name, how in zip(("training episodes", "evaluations"), row["actions"])]
            labels = labels if number == 0 else [None, None]
            axes.plot(*curve.T, color="#0072b2", linewidth=1, alpha=0.7, label=labels[0])
            axes.plot(points[:, 0], points[:, 1], "s--", color="#d55e00", linewidth=0.8, markersize=4, label=labels[1])
            text = f"results, {row['result_episodes']} episodes, {row['actions'][1]}" if number == 0 else None
            axes.plot(curve[-1, 0] * 1.03, row["result"], "_", color="black", markersize=12, label=text)
        axes.set_title(f"{runs[0]['settings']['env']}, {runs[0]['settings']['core']}, {len(runs)} seeds", fontsize=11)
        axes.set_xlabel("environment steps")
        axes.set_ylabel("mean return")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102, 103, 104, 105])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="print the table of the results and run nothing")
    parser.add_argument("--plot", type=Path, help="draw the results and run nothing")
    options = parser.parse_args()
    read = lambda: [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []  # noqa: E731
    if options.plot:
        plot(read(), options.plot)
    if not (options.plot or options.report):
        import torch

        torch.set_num_threads(1)
        finished = {(row["task"], row["seed"]) for row in read()}
        for task, seed in ((task, seed) for task in options.tasks for seed in options.seeds):
            if (task, seed) not in finished:
                with options.out.open("a") as file:
                    file.write(json.dumps(run_one(task, seed)) + "\n")
                print(task, seed, flush=True)
    print(report(read()))


if __name__ == "__main__":
    main()
