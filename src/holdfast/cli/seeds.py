"""`holdfast train --seeds`: one run per seed and one result for all of them.

On CPUs each run is a process of its own, as many at a time as there are cores; on a GPU the runs go one after another.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.run import draw, train_one
from holdfast.config import TrainConfig

SECONDS_BETWEEN_LOOKS = 0.5


def train_seeds(configs: list[TrainConfig]) -> None:
    """Train all configs, which differ in their seeds, and print their returns as one."""
    from holdfast.distributed import ranks as distributed
    from holdfast.training import chosen

    if len({config.seed for config in configs}) < len(configs):
        raise UserError("--seeds names a seed twice; every run needs a different seed")
    if distributed.launched():
        raise UserError("--seeds starts its own processes; leave out torchrun, or train one seed")
    with user_errors():
        on_gpu = distributed.pick_device(configs[0].device).type == "cuda"
        task = chosen.Task(on_gpu, fast_env=configs[0].env.startswith("holdfast/"))
        configs = [_with_free_folder(chosen.choose_sizes(config, task)[0]) for config in configs]
    try:
        _train_in_turn(configs) if on_gpu else _train_in_processes(configs)
    except (KeyboardInterrupt, SystemExit):
        print("\n".join(_what_was_done(config) for config in configs), flush=True)
        raise
    with user_errors():
        _report(configs)


def _with_free_folder(config: TrainConfig) -> TrainConfig:
    """A run without a name gets the first free one here, since others must find its folder."""
    from holdfast.runs.writing import new_folder

    return config if config.name is not None else dataclasses.replace(config, run_dir=str(new_folder(config.folder)))


def _train_in_turn(configs: list[TrainConfig]) -> None:
    for config in configs:
        result = train_one(config)
        if result is not None and result.stopped_by == "interrupt":
            raise KeyboardInterrupt


def _train_in_processes(configs: list[TrainConfig]) -> None:
    from holdfast.display.side_by_side import SideBySide

    if not configs[0].quiet:
        print(f"{len(configs)} seeds, {min(len(configs), num_cores())} at a time, in {configs[0].folder.parent}")
    problems, display = [], SideBySide(configs)
    try:
        for config, output, problem in train_side_by_side(configs, display.refresh):
            result = "\n".join(line for line in output.splitlines() if not line.startswith("run "))
            display.ended(config, problem or result)
            problems += [f"seed {config.seed}: {problem}"] if problem else []
    finally:
        display.close()
    if problems:
        raise UserError("; ".join(problems))


def _what_was_done(config: TrainConfig) -> str:
    """One line about a run of several that were stopped."""
    from holdfast.display.side_by_side import last_row
    from holdfast.config.imports import allow_imports_flag
    from holdfast.runs import checkpoint

    saved = checkpoint.rolling(config.folder)
    if not saved:
        return f"seed {config.seed}  nothing is saved"
    done = f"update {last_row(config.folder).get('update', 0):.0f} of {config.num_updates}"
    resume = f"holdfast train --resume {shlex.quote(str(config.folder))}{allow_imports_flag(config)}"
    return f"seed {config.seed}  {done}; continue with   {resume}"


def _report(configs: list[TrainConfig]) -> None:
    import numpy as np

    from holdfast.display.aggregate import bootstrap_interval, interquartile_mean, is_mean_and_range
    from holdfast.display.dashboard import number
    from holdfast.runs.log import RESULT_NAME

    runs = [config.folder for config in configs]
    scores = np.array([json.loads((run / RESULT_NAME).read_text())["mean_return"] for run in runs])
    low, high = bootstrap_interval([scores])
    what = "mean, range" if is_mean_and_range(len(runs)) else "interquartile mean, 95% bootstrap interval"
    print(
        f"return {number(float(interquartile_mean(scores)))} [{number(low)}, {number(high)}] over {len(runs)} seeds "
        f"({what})"
    )
    plot = draw(runs, _figure_of(configs[0]), aggregate="iqm")
    print(f"all seeds  {plot}" if plot else "")


def _figure_of(config: TrainConfig) -> Path:
    """Named as the runs without their seeds, and free: an earlier command may have drawn other runs."""
    name = Path(config.name or config.automatic_name).name.removesuffix(f"-seed{config.seed}")
    path, number = config.folder.parent / f"{name}-seeds.png", 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}-seeds-{number}.png")
    return path


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_side_by_side(
    configs: Sequence[TrainConfig], look: Callable[[], None] = lambda: None
) -> Iterator[tuple[TrainConfig, str, str]]:
    """Run all; yields each run when it ends, with what it printed and the line it failed with ("" if it succeeded).

    look: called every half second. The cores are shared out evenly. Ctrl-C reaches the child processes too, and SIGTERM
    is passed on to them: each saves and stops, and no other starts.
    """
    at_a_time = min(len(configs), num_cores())
    threads = max(1, num_cores() // at_a_time)
    stop = _Stop()

    def train(config: TrainConfig) -> tuple[str, str]:
        return ("", "stopped") if stop.requested else train_in_process(config, Path(folder), threads)

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder, ThreadPoolExecutor(at_a_time) as pool, stop:
        try:
            running = {pool.submit(train, config): config for config in configs}
            waiting = set(running)
            while waiting:
                done, waiting = wait(waiting, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                stop.raise_if_requested()
                look()
                for future in done:
                    stop.raise_if_requested()
                    yield running[future], *future.result()
        finally:
            stop.requested = stop.requested or signal.SIGINT  # whatever ended the loop, no other run starts
            pool.shutdown(cancel_futures=True)


class _Stop:
    """Ctrl-C and SIGTERM while runs are in progress.

    The signal is kept and the loop asks for it: an exception in the middle of `wait` could leave the lock of a future taken, and
    the thread that has its result would wait for it forever.
    """

    def __init__(self) -> None:
        self.requested = 0  # the number of the signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        self.requested = number
        if number == signal.SIGTERM:  # a terminal sends Ctrl-C to the children itself
            for child in list(_children):
                child.terminate()

    def raise_if_requested(self) -> None:
        if self.requested:
            raise KeyboardInterrupt if self.requested == signal.SIGINT else SystemExit(128 + self.requested)


_children: set[subprocess.Popen[str]] = set()


def train_in_process(config: TrainConfig, folder: Path, threads: int) -> tuple[str, str]:
    """Train in a child process; returns what it printed and the line it failed with ("" if it succeeded)."""
    file = folder / f"{config.seed}.json"
    file.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "holdfast", "train", "--config", str(file), "--run-dir", str(config.folder)]
    command.append("--allow-imports")  # this process has asked already
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([*command, "--quiet"], env=environment, **pipes) as child:
        _children.add(child)
        try:
            out, err = child.communicate()
        finally:
            _children.discard(child)
    problem = "" if child.returncode == 0 else (err.strip() or f"exit code {child.returncode}")
    return out.strip(), problem.splitlines()[-1] if problem else ""
