"""What settings are worth: variants of PPO's defaults, some seeds each. The rows of `results/tuning.jsonl` are made this way.

    python benchmarks/tuning.py --round 13 --steps 300000 --seeds 1 2 --variant "defaults" --variant "white noise" noise_correlation=0
    python benchmarks/tuning.py --round 12 --tasks LunarLander --cores lstm --seeds 1 2 --variant "entropy linear" entropy_schedule=linear
    python benchmarks/tuning.py --round 13 --report --base "defaults" --plot docs/control_ablation.png

Tasks are those of the suites `control` and `out-of-the-box` (`src/holdfast/bench/suites`); without --tasks, those of `control` that
are tuned on. A run is a process on one thread; its figures are the mean returns of fresh episodes, with sampled actions and with
the most likely ones. Finished runs are lines of the file and are not run again.

The report compares each variant with --base on the same tasks, cores and seeds. A score is 0 for random actions and 1 for the suite's
`high`; the interval is a 95% bootstrap over the pairs of runs of each task.

MuJoCo: pip install 'gymnasium[mujoco]'. LunarLander needs Box2D: pip install 'holdfast[box2d]'
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from out_of_the_box import parse_value, read_results, read_rows
from this_commit import this_commit

from holdfast.bench.suite import SuiteTask, load

RESULTS = Path(__file__).parent / "results" / "tuning.jsonl"
SUITES = [load(name) for name in ("control", "out-of-the-box")]
TASKS: dict[str, SuiteTask] = {task.name: task for suite in reversed(SUITES) for task in suite.tasks}
_TUNED_ON = ("InvertedPendulum", "Reacher", "Swimmer", "Hopper", "HalfCheetah")
TUNED_ON = [task.name for task in SUITES[0].tasks if task.name.removesuffix("-P") in _TUNED_ON]
"""With positions only, or all observed. The other tasks of the control suite are held out."""
KEY = ("round", "variant", "task", "core", "seed")


# --- one run, in a process of its own ---------------------------------------------------------------------------------


def run_one(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    import holdfast as hf

    torch.set_num_threads(1)
    task = TASKS[job["task"]]
    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            "total_steps": job["total_steps"],
            **task.settings,
            **job["settings"],
            "final_eval_episodes": job["episodes"],
        }
        upkeep = dict(
            quiet=True, tensorboard=False, checkpoint_every=0, threads=1, device="cpu", run_dir=f"{folder}/run"
        )
        config = hf.TrainConfig(env=task.env, core=job["core"], seed=job["seed"], **wanted, **upkeep)
        trainer = hf.Trainer(config)
        began = time.perf_counter()
        result = trainer.run()
        seconds = time.perf_counter() - began
        greedy = trainer.evaluate(job["episodes"], deterministic=True)
        rows = read_rows(Path(folder) / "run" / "progress.csv")
    curve = [[int(float(row["steps"])), float(f"{float(row['rollout/ep_rew_mean']):.5g}")] for row in rows]
    curve = [point for point in curve if point[1] == point[1]]  # NaN: no episode has ended yet
    return {
        **job, "commit": this_commit(), "sampled": result.mean_return, "deterministic": greedy.mean_return, "steps": result.steps,
        "seconds": round(seconds, 1), "curve": curve[:: max(1, len(curve) // 20)],
    }  # fmt: skip


def run_job(job: dict[str, Any], out: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, "--one", json.dumps(job)], capture_output=True, text=True, env=env)
    name = " / ".join(str(job[field]) for field in KEY)
    if done.returncode:
        print(f"{name}: {done.stderr.strip()[-600:]}", flush=True)  # not a line of the file: it is tried again
        return
    row = json.loads(done.stdout.strip().splitlines()[-1])
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{name}: {row['sampled']:.4g} ({row['deterministic']:.4g}) in {row['seconds']:.0f} s", flush=True)


# --- the report -------------------------------------------------------------------------------------------------------


def differences(rows: list[dict[str, Any]], base: str, measure: str = "sampled") -> dict[str, dict[str, list[float]]]:
    """variant -> task -> score of its run minus that of `base` with the same core, seed and steps, a number per pair."""
    runs = {(row["variant"], row["task"], row["core"], row["seed"], _steps(row)): row[measure] for row in rows}
    found: dict[str, dict[str, list[float]]] = {}
    for (variant, name, *rest), value in runs.items():
        task, beside = TASKS[name], runs.get((base, name, *rest))
        if variant != base and beside is not None and task.low is not None and task.high is not None:
            found.setdefault(variant, {}).setdefault(name, []).append((value - beside) / (task.high - task.low))
    return found


def _steps(row: dict[str, Any]) -> int:
    return int(row.get("total_steps", 0))


def interval(tasks: dict[str, list[float]], draws: int = 2000) -> tuple[float, float, float]:
    """Mean over tasks of the mean difference, and its 95% bootstrap interval: tasks are resampled, then the pairs of each."""
    rng = random.Random(0)
    means = []
    for _ in range(draws):
        chosen = rng.choices(list(tasks.values()), k=len(tasks))
        means.append(statistics.fmean(statistics.fmean(rng.choices(pairs, k=len(pairs))) for pairs in chosen))
    means.sort()
    return (
        statistics.fmean(map(statistics.fmean, tasks.values())),
        means[int(0.025 * draws)],
        means[int(0.975 * draws) - 1],
    )


def report(rows: list[dict[str, Any]], base: str) -> str:
    """A markdown table: the mean returns of each variant, and what it is worth against `base`."""
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    lines = [
        f"| variant | {' | '.join(names)} | score against {base} |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    worth = differences(rows, base)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = []
        for name in names:
            values = [row["sampled"] for row in sorted(rows, key=lambda r: r["seed"]) if (row["variant"], row["task"]) == (variant, name)]  # fmt: skip
            cells.append(", ".join(f"{value:.4g}" for value in values))
        last = ""
        if variant in worth:
            mean, low, high = interval(worth[variant])
            pairs = sum(map(len, worth[variant].values()))
            last = f"{mean:+.2f}" + (f" [{low:+.2f}, {high:+.2f}], {pairs} pairs" if pairs > 1 else ", 1 pair")
        lines.append(f"| {variant} | {' | '.join(cells)} | {last} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], base: str, path: Path) -> None:
    """What each variant is worth: a mark per task, and the mean with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    worth = differences(rows, base)
    names = [name for name in TASKS if any(name in tasks for tasks in worth.values())]
    colors = dict(zip(names, pyplot.get_cmap("tab20").colors))  # type: ignore[attr-defined]
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(worth) + 1.6), constrained_layout=True)
    for place, tasks in enumerate(reversed(list(worth.values()))):
        for name, pairs in tasks.items():
            axes.plot(statistics.fmean(pairs), place + 0.15, "o", color=colors[name], markersize=5, label=name)
        mean, low, high = interval(tasks)
        axes.errorbar(mean, place - 0.15, xerr=[[max(0, mean - low)], [max(0, high - mean)]], fmt="D", color="black", markersize=4, capsize=3)  # fmt: skip
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set_yticks(range(len(worth)), list(reversed(list(worth))), fontsize=8)
    axes.set_xlabel(f"score minus that of {base}; circles: tasks; diamonds: mean and 95% interval")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=list(TASKS),
        metavar="TASK",
        help="by default those that are tuned on; of a report, all",
    )
    parser.add_argument("--cores", nargs="+", default=["gru"], help="of tasks that do not name their own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, help="of every run; by default the suite's")
    parser.add_argument("--episodes", type=int, default=100, help="of each evaluation")
    parser.add_argument("--round", type=int, default=13, help="what the runs belong to")
    parser.add_argument("--variant", nargs="+", action="append", metavar=("NAME", "field=value"), default=[])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="print the table of finished runs, and run nothing")
    parser.add_argument("--base", default="defaults", help="with --report: the variant that others are compared with")
    parser.add_argument("--plot", type=Path, help="with --report: also draw this picture")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(json.loads(options.one))))
        return
    rows = [row for row in read_results(options.out) if row["round"] == options.round and "experiment" not in row]
    if options.report:
        rows = [row for row in rows if row["task"] in (options.tasks or TASKS)]
        print(report(rows, options.base))
        if options.plot:
            plot(rows, options.base, options.plot)
        return
    steps = {task.name: suite.steps_of(task, options.steps) for suite in reversed(SUITES) for task in suite.tasks}
    jobs = [
        {"round": options.round, "variant": name, "settings": {k: parse_value(v) for k, v in (pair.split("=", 1) for pair in pairs)},
         "task": task, "core": core, "seed": seed, "total_steps": steps[task], "episodes": options.episodes}
        for name, *pairs in options.variant or [["defaults"]]
        for seed in options.seeds
        for task in options.tasks or TUNED_ON
        for core in TASKS[task].cores or options.cores
    ]  # fmt: skip
    finished = {(*(row[field] for field in KEY), _steps(row)) for row in rows}
    jobs = [job for job in jobs if (*(job[field] for field in KEY), _steps(job)) not in finished]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: run_job(job, options.out), jobs))


if __name__ == "__main__":
    main()
