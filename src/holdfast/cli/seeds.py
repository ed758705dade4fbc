"""`holdfast train --seeds`: one run per seed and one result for all of them.

On CPUs each run is a process of its own, as many at a time as there are cores; on a GPU the runs go one after another.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.run import draw, train_one
from holdfast.config import RunConfig
from holdfast.distributed.processes import Child, Processes, num_cores
from holdfast.shown_text import show

SECONDS_BETWEEN_LOOKS = 0.5


def train_seeds(configs: list[RunConfig]) -> None:
    """Train all configs, which differ in their seeds, and print their returns as one."""
    from holdfast.distributed import ranks as distributed
    from holdfast.training.parts import with_sizes

    if len({config.seed for config in configs}) < len(configs):
        raise UserError("--seeds names a seed twice; every run needs a different seed")
    if distributed.launched():
        raise UserError("--seeds starts its own processes; leave out torchrun, or train one seed")
    with user_errors():
        on_gpu = distributed.pick_device(configs[0].device).type == "cuda"
        configs = [_with_free_folder(with_sizes(config)) for config in configs]
    try:
        _train_in_turn(configs) if on_gpu else _train_in_processes(configs)
    except (KeyboardInterrupt, SystemExit):
        show(*map(_what_was_done, configs))
        raise
    with user_errors():
        _report(configs)


def _with_free_folder(config: RunConfig) -> RunConfig:
    """A run without a name gets the first free one here, since others must find its folder."""
    from holdfast.runs.writing import new_folder

    return config if config.name is not None else dataclasses.replace(config, run_dir=str(new_folder(config.folder)))


def _train_in_turn(configs: list[RunConfig]) -> None:
    for config in configs:
        result = train_one(config)
        if result is not None and result.stopped_by == "interrupt":
            raise KeyboardInterrupt


def _train_in_processes(configs: list[RunConfig]) -> None:
    from holdfast.display.side_by_side import SideBySide

    at_a_time = min(len(configs), num_cores())
    if not configs[0].quiet:
        show(f"{len(configs)} seeds, {at_a_time} at a time, in {configs[0].folder.parent}")
    environment = {"OMP_NUM_THREADS": str(num_cores() // at_a_time), **os.environ}
    display, waiting, problems = SideBySide(configs), list(configs), []
    running: dict[Child, RunConfig] = {}
    with closing(display), TemporaryDirectory(prefix="holdfast-") as folder, Processes() as processes:
        try:
            while waiting or running:
                if waiting and len(running) < at_a_time:
                    command = train_command(waiting[0], Path(folder))
                    running[processes.start(command, env=environment)] = waiting.pop(0)
                    continue
                child, _ = processes.next(SECONDS_BETWEEN_LOOKS)
                display.refresh()
                if child is not None:
                    config, (ended, output, error) = running.pop(child), child.reap()
                    result = "\n".join(line for line in output.strip().splitlines() if not line.startswith("run "))
                    problem = (error or ended) if child.returncode else ""
                    display.ended(config, problem or result)
                    problems += [f"seed {config.seed}: {problem}"] if problem else []
                    with suppress(OSError):  # of a run that never began, so that the next one has its name
                        config.folder.rmdir()
        except KeyboardInterrupt:  # a terminal sends it to the children itself
            processes.wait()
            raise
    if problems:
        raise UserError("; ".join(problems))


def train_command(config: RunConfig, folder: Path) -> list[str]:
    """Arguments of a Python that trains the config. This process has asked already whether modules may be imported."""
    file = folder / f"{config.seed}.json"
    file.write_text(json.dumps(config.to_dict()))
    flags = ["--config", str(file), "--run-dir", str(config.folder), "--allow-imports", "--quiet"]
    return ["-m", "holdfast", "train", *flags]


def _what_was_done(config: RunConfig) -> str:
    """One line about a run of several that were stopped."""
    from holdfast.config.imports import allow_imports_flag
    from holdfast.display.side_by_side import last_row
    from holdfast.runs import checkpoint

    saved = checkpoint.rolling(config.folder)
    if not saved:
        return f"seed {config.seed}  nothing is saved"
    done = f"update {last_row(config.folder).get('update', 0):.0f} of {config.num_updates}"
    resume = f"holdfast train --resume {shlex.quote(str(config.folder))}{allow_imports_flag(config)}"
    return f"seed {config.seed}  {done}; continue with   {resume}"


def _report(configs: list[RunConfig]) -> None:
    import numpy as np

    from holdfast.display.aggregate import bootstrap_interval, interquartile_mean, is_mean_and_range
    from holdfast.display.dashboard import number
    from holdfast.runs.log import RESULT_NAME

    runs = [config.folder for config in configs]
    scores = np.array([json.loads((run / RESULT_NAME).read_text())["mean_return"] for run in runs])
    low, high = bootstrap_interval([scores])
    what = "mean, range" if is_mean_and_range(len(runs)) else "interquartile mean, 95% bootstrap interval"
    show(
        f"return {number(float(interquartile_mean(scores)))} [{number(low)}, {number(high)}] over {len(runs)} seeds "
        f"({what})"
    )
    plot = draw(runs, _figure_of(configs[0]), aggregate="iqm")
    show(f"all seeds  {plot}" if plot else "")


def _figure_of(config: RunConfig) -> Path:
    """Named as the runs without their seeds, and free: an earlier command may have drawn other runs."""
    name = Path(config.name or config.automatic_name).name.removesuffix(f"-seed{config.seed}")
    path, number = config.folder.parent / f"{name}-seeds.png", 1
    while path.exists():
        number += 1
        path = path.with_name(f"{name}-seeds-{number}.png")
    return path
