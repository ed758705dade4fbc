"""What the default settings of SAC and R2D2 reach on a CPU: no flag but the algorithm, the task and its number of steps.

    python benchmarks/off_policy_learning.py                                   # all tasks, 5 seeds each
    python benchmarks/off_policy_learning.py --tasks Pendulum --seeds 101 102
    python benchmarks/off_policy_learning.py --variant ratio1 update_ratio=1.0 --seeds 1 --out /tmp/tried.jsonl
    python benchmarks/off_policy_learning.py --report                          # the table of what was run

One run after another, on one thread. A return is the mean of 100 fresh episodes with the most likely actions. Finished runs are lines
of the JSON file and are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from out_of_the_box import parse_value, read_results, read_rows
from this_commit import this_commit

RESULTS = Path(__file__).parent / "results" / "off_policy_learning.jsonl"


@dataclass(frozen=True)
class Task:
    """target: the return that the defaults are to reach."""

    algorithm: str
    env: str
    steps: int
    target: float
    mask_velocity: bool = False


TASKS = {
    "Pendulum": Task("sac", "Pendulum-v1", 30_000, -170, True),
    "RepeatPreviousEasy": Task("r2d2", "holdfast/RepeatPreviousEasy-v0", 300_000, 0.95),
    "CartPole": Task("r2d2", "CartPole-v1", 300_000, 450, True),
    "TMaze": Task("r2d2", "holdfast/TMaze-v0", 500_000, 0.95),
}


def run(name: str, seed: int, variant: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One run as a line of the results."""
    import torch

    import holdfast as hf

    torch.set_num_threads(1)
    task = TASKS[name]
    make: Any = {"sac": hf.SACConfig, "r2d2": hf.R2D2Config}[task.algorithm]
    with tempfile.TemporaryDirectory() as folder:
        given = {"env": task.env, "mask_velocity": task.mask_velocity, "total_steps": task.steps, **settings}
        upkeep = dict(
            run_dir=f"{folder}/run", quiet=True, tensorboard=False, checkpoint_every=0, threads=1, device="cpu"
        )
        trainer = hf.Trainer(make(**given, **upkeep, seed=seed))
        clocks = time.perf_counter, time.process_time
        began = [clock() for clock in clocks]
        result = trainer.run()
        wall, cpu = (round(clock() - before) for clock, before in zip(clocks, began))
        rows = read_rows(Path(folder) / "run" / "progress.csv")
    curve = [[int(float(row["steps"])), round(float(row["rollout/ep_rew_mean"]), 4)] for row in rows]
    curve = [point for point in curve if point[1] == point[1]]  # NaN: no episode has ended yet
    return {
        "task": name, "algorithm": task.algorithm, "seed": seed, "variant": variant, "settings": settings, "commit": this_commit(),
        "return": round(result.mean_return, 4), "steps": result.steps, "seconds": wall, "cpu_seconds": cpu,
        "curve": curve[:: max(1, len(curve) // 40)],
    }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> str:
    lines = ["| task | algorithm | steps | target | each seed | CPU-seconds |", "|---|---|---|---|---|---|"]
    for variant, name in dict.fromkeys((row["variant"], row["task"]) for row in rows):
        task, runs = TASKS[name], [row for row in rows if (row["variant"], row["task"]) == (variant, name)]
        runs.sort(key=lambda row: row["seed"])
        cells = [
            name + (", positions only" if task.mask_velocity else "") + (f" [{variant}]" if variant else ""),
            task.algorithm.upper(),
            f"{runs[0]['settings'].get('total_steps', task.steps):,}",
            f"{task.target:g}",
            ", ".join(f"{row['return']:.4g}" for row in runs),
            f"{min(row['cpu_seconds'] for row in runs)} to {max(row['cpu_seconds'] for row in runs)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102, 103, 104, 105])
    parser.add_argument(
        "--variant", nargs="+", metavar=("NAME", "field=value"), help="settings other than the defaults"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="print the table of finished runs, and run nothing")
    options = parser.parse_args()
    if not options.report:
        variant, *pairs = options.variant or [""]
        settings = {key: parse_value(value) for key, value in (pair.split("=", 1) for pair in pairs)}
        done = {(row["variant"], row["task"], row["seed"]) for row in read_results(options.out)}
        for name in options.tasks:
            for seed in options.seeds:
                if (variant, name, seed) not in done:
                    row = run(name, seed, variant, settings)
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(
                        f"{variant} {name} seed {seed}: {row['return']} in {row['cpu_seconds']} CPU-seconds", flush=True
                    )
    print(report(read_results(options.out)))


if __name__ == "__main__":
    main()
