"""`holdfast train --seeds`: one run per seed and one result for all of them.

On CPUs each run is a process of its own, as many at a time as there are cores; on a GPU the runs go one after another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.run import draw, train_one
from holdfast.config import TrainConfig


def train_seeds(configs: list[TrainConfig]) -> None:
    """Train all configs, which differ in their seeds, and print their returns as one."""
    from holdfast.distributed import ranks as distributed

    if len({config.seed for config in configs}) < len(configs):
        raise UserError("--seeds names a seed twice; every run needs its own")
    if distributed.launched():
        raise UserError("--seeds starts processes of its own; leave out torchrun, or train one seed")
    with user_errors():
        on_gpu = distributed.pick_device(configs[0].device).type == "cuda"
    if on_gpu:
        for config in configs:
            train_one(config)
    else:
        _train_in_processes(configs)
    _report([config.folder for config in configs])


def _train_in_processes(configs: list[TrainConfig]) -> None:
    if not configs[0].quiet:
        print(f"{len(configs)} seeds, {min(len(configs), num_cores())} at a time, in {configs[0].folder.parent}")
    problems = []
    for config, output, problem in train_side_by_side(configs):
        print(f"seed {config.seed}  {problem or output}", flush=True)
        problems += [f"seed {config.seed}: {problem}"] if problem else []
    if problems:
        raise UserError("; ".join(problems))


def _report(runs: list[Path]) -> None:
    import numpy as np

    from holdfast.display.aggregate import bootstrap_interval, interquartile_mean
    from holdfast.display.dashboard import number
    from holdfast.runs.log import RESULT_NAME

    scores = np.array([json.loads((run / RESULT_NAME).read_text())["mean_return"] for run in runs])
    low, high = bootstrap_interval([scores])
    print(
        f"return {number(float(interquartile_mean(scores)))} [{number(low)}, {number(high)}] over {len(runs)} seeds "
        "(interquartile mean, 95% bootstrap interval)"
    )
    plot = draw(runs, runs[0].parent / "seeds.png", aggregate="iqm")
    print(f"all seeds  {plot}" if plot else "")


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_side_by_side(configs: Sequence[TrainConfig]) -> Iterator[tuple[TrainConfig, str, str]]:
    """Run all; yields each run when it ends, with what it printed and the line it failed with ("" if it succeeded).

    The cores are shared out evenly. Ctrl-C reaches the child processes too: each saves and stops, and no other starts.
    """
    at_a_time = min(len(configs), num_cores())
    threads = max(1, num_cores() // at_a_time)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder, ThreadPoolExecutor(at_a_time) as pool:
        running = {pool.submit(train_in_process, config, Path(folder), threads): config for config in configs}
        try:
            for done in as_completed(running):
                yield running[done], *done.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def train_in_process(config: TrainConfig, folder: Path, threads: int) -> tuple[str, str]:
    """Train in a child process; returns what it printed and the line it failed with ("" if it succeeded)."""
    file = folder / f"{config.seed}.json"
    file.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "holdfast", "train", "--config", str(file), "--run-dir", str(config.folder)]
    command.append("--allow-imports")  # this process has asked already
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, env=environment)
    problem = "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout.strip(), problem.splitlines()[-1] if problem else ""
