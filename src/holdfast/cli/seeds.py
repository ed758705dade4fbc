"""Several seeds of one setting: each a run in a process of its own, as many at a time as there are cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from holdfast.config import TrainConfig


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_side_by_side(configs: Sequence[TrainConfig]) -> Iterator[tuple[TrainConfig, str, str]]:
    """Run all; each as it ends, with what it said and the line it failed with ("" if it did not).

    The cores are shared out evenly. Ctrl-C reaches the runs too: each saves and stops, and none is begun any more.
    """
    at_a_time = min(len(configs), cores())
    threads = max(1, cores() // at_a_time)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder, ThreadPoolExecutor(at_a_time) as pool:
        running = {pool.submit(_train, config, Path(folder), threads): config for config in configs}
        try:
            for done in as_completed(running):
                yield running[done], *done.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def _train(config: TrainConfig, folder: Path, threads: int) -> tuple[str, str]:
    file = folder / f"{config.seed}.json"
    file.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "holdfast", "train", "--config", str(file), "--run-dir", str(config.folder)]
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, env=environment)
    problem = "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout.strip(), problem.splitlines()[-1] if problem else ""
