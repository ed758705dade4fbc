"""`holdfast sweep`: search for better settings with several processes, and write the best ones as a preset."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, Literal

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.flags import value_of
from holdfast.cli.settings import defaults_from, parse_with_settings, require_one_source, typed_names
from holdfast.config import PRESETS, RunConfig, imports, settings_of
from holdfast.distributed.processes import Processes, num_cores
from holdfast.shown_text import OutputError, show, without_password
from holdfast.sweep.database import database_reason, require_no_links, require_shared

WORKER = "HOLDFAST_SWEEP_WORKER"  # the number of a process that another one has started
MOST_WORKERS, MOST_SEEDS = 1024, 1000
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass
class SweepFlags:
    """Search for settings that learn faster. Trial 0 has the settings of --preset, --config or the flags below; the others vary
    them. Run the same command again to continue after an interruption, or at the same time in other terminals to speed it up."""

    preset: str | None = None
    """Settings to start from, by name or file; the environment's own preset by default, if it has one."""
    config: Path | None = None
    """Settings to start from: the config.json of a run."""
    trials: int = 50
    """Settings to try, in the whole study."""
    time: str | None = None
    """Stop after this long, such as 90s, 30m, 2h or 1d; the study can continue later. None: when all trials are done."""
    workers: int = 0
    """Processes of this command; 0: one per CPU core, or one on a GPU."""
    space: Path | None = None
    """The settings to vary, a JSON file; by default the sweep's space.json, which is created if it is missing."""
    write_space: bool = False
    """Write space.json for you to edit, and stop."""
    objective: Literal["area", "final"] = "area"
    """The mean of the learning curve over all steps (fast learning counts), or the return at the end."""
    confirm: int = 3
    """Fresh seeds on which trial 0 and the best two other trials are compared at the end; 0: none."""
    prune: bool = True
    """Stop a trial whose learning curve is below the median of the earlier ones."""
    study: str | None = None
    """Name of the study and its folder; by default that of the environment."""
    storage: str | None = None
    """Address of a database, for several machines; by default an SQLite file in the folder runs/sweeps/<study>."""
    allow_imports: bool = False
    """Import modules that the file of --preset, --config or --space names, which runs their code."""
    env_args: tuple[str, ...] = ()
    """Arguments for the environment's constructor, as name=value."""


def main(argv: list[str]) -> int:
    worker = int(os.environ.get(WORKER, 0))
    flags, base = _settings(argv)
    if flags.trials < 1:
        raise UserError("--trials must be at least 1")
    if not 0 <= flags.workers <= MOST_WORKERS:
        raise UserError(f"--workers must be between 0 and {MOST_WORKERS}, got {flags.workers}")
    if not 0 <= flags.confirm <= MOST_SEEDS:
        raise UserError(f"--confirm must be between 0 and {MOST_SEEDS}, got {flags.confirm}")
    from holdfast.algorithms import algorithm_class
    from holdfast.sweep.sweep import SPACE_NAME, Sweep, space_of

    with user_errors():
        base, on_gpu = _with_sizes(base)
        name = flags.study or base.env.removeprefix("holdfast/").replace("/", "-").replace(":", "-")
        if Path(name).is_absolute() or ".." in Path(name).parts or not name.isprintable():
            raise UserError(f"--study {name!r} leaves the folder runs/sweeps; use a plain name")
        folder = Path("runs/sweeps") / name
        space = space_of(folder, flags.space, base)
        for config, source in _named_by_files(base, space, flags, folder / SPACE_NAME):
            imports.require_allowed(config, source, flags.allow_imports, typed_names(argv, config))
    if flags.write_space:
        show(folder / SPACE_NAME)
        return 0
    seconds, workers = _seconds(flags.time), flags.workers or (1 if on_gpu else num_cores())
    if base.threads is None and not on_gpu:
        base.threads = max(
            1, min(num_cores() // workers, algorithm_class(base.algorithm).choose_threads(base, base.num_envs))
        )
    parent = os.getppid()
    with _study_errors(folder):
        require_shared(flags.storage, workers)
        require_no_links(folder)
        sweep = Sweep(
            base,
            space,
            folder,
            flags.storage or f"sqlite:///{folder.absolute() / 'study.db'}",
            name,
            flags.trials,
            seeds=flags.confirm,
            objective=flags.objective,
            pruning=flags.prune,
            worker=worker,
            seconds=seconds,
            notify=(lambda text: None) if worker else show,
            may_continue=lambda: not worker or os.getppid() == parent,
        )
    if not worker:
        count = f"{flags.trials} trial{'s' if flags.trials > 1 else ''}"
        show(f"{count} in {folder}, {workers} at a time; trial 0 is {_start(flags, argv)}")
    try:
        with Processes() as processes:  # the others run the same command, and end when this one does
            for number in range(1, 1 if worker else workers):
                environment = {**os.environ, WORKER: str(number)}
                processes.start(["-m", "holdfast", "sweep", *argv], env=environment, stdout=DEVNULL, stderr=DEVNULL)
            with _study_errors(folder):
                sweep.run()
            processes.wait()
    except (KeyboardInterrupt, SystemExit):
        if not worker:
            show(_go_on(argv))
        raise
    if not worker:
        with _study_errors(folder):
            _conclude(sweep, argv)
    return 0


# --- settings ---------------------------------------------------------------------------------------------------------


def _settings(argv: list[str]) -> tuple[SweepFlags, RunConfig]:
    preset, config_file = value_of(argv, "--preset"), value_of(argv, "--config")
    require_one_source([("--preset", preset), ("--config", config_file)])
    if preset is None and config_file is None:
        preset = _preset_of(argv)
    with user_errors():
        defaults = defaults_from(argv, preset, config_file)
    return parse_with_settings(SweepFlags, argv, "sweep", defaults)


def _named_by_files(
    base: RunConfig, space: Any, flags: SweepFlags, own_space: Path
) -> Iterator[tuple[RunConfig, Path]]:
    """Settings with every name that a file gives them, and the file."""
    yield base, Path(flags.config or flags.preset or "the command line")
    for parameter in space:
        if parameter.name in imports.names_objects(type(base)):
            for choice in parameter.choices:
                yield dataclasses.replace(base, **{parameter.name: choice}), flags.space or own_space


def _preset_of(argv: list[str]) -> str | None:
    """The preset of an environment, the one that hides its velocities if the command does; none if an algorithm is named."""
    if value_of(argv, "--algorithm") is not None:
        return None
    env, masked = value_of(argv, "--env"), "--mask-velocity" in argv
    named = [name for name, settings in PRESETS.items() if settings["env"] == env]
    as_played = [name for name in named if PRESETS[name].get("mask_velocity", False) == masked]
    return next(iter(as_played + named), None)


def _start(flags: SweepFlags, argv: list[str]) -> str:
    if flags.config:
        return str(flags.config)
    preset = flags.preset or _preset_of(argv)
    return f"the preset {preset}" if preset else "the default"


def _with_sizes(config: RunConfig) -> tuple[RunConfig, bool]:
    """The config with all sizes chosen, so that they can be varied; and whether it runs on a GPU."""
    from holdfast.distributed import ranks as distributed
    from holdfast.training.parts import with_sizes

    if distributed.launched():
        raise UserError("sweep starts its own processes; leave out torchrun")
    on_gpu = distributed.pick_device(config.device).type == "cuda"
    declared = settings_of(type(config)).items()
    # What a run would choose for its actions and a sweep varies: it begins with the first value.
    begins = {
        name: one.chosen[0] for name, one in declared if one.chosen and one.search and getattr(config, name) is None
    }
    return dataclasses.replace(with_sizes(config), **begins, run_dir=None, name=None), on_gpu


def _seconds(text: str | None) -> float | None:
    """
    >>> _seconds("90"), _seconds("1.5h"), _seconds(None)
    (90.0, 5400.0, None)
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?)([smhd]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UserError(f"--time {text!r}: expected a time such as 90s, 30m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2]]


@contextmanager
def _study_errors(folder: Path) -> Iterator[None]:
    """What a trial raises is recorded in the study. Any other error is in the study itself: its database or its files."""
    try:
        with user_errors():
            yield
    except (UserError, OutputError):
        raise
    except Exception as error:
        reason = database_reason(error)
        if "disk is full" in reason:
            raise UserError(f"{folder}: {reason}; free some space, then run the same command again") from error
        raise UserError(
            f"the study in {folder} cannot be used: {reason}; choose another --study, or repair it"
        ) from error


# --- the end ----------------------------------------------------------------------------------------------------------


def _conclude(sweep: Any, argv: list[str]) -> None:
    from holdfast.config.imports import allow_imports_flag

    outcomes = sweep.search.outcomes()
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in ("complete", "pruned", "failed")}
    show(", ".join(f"{count} {state}" for state, count in counts.items() if count) or "nothing is finished")
    if len(outcomes) < sweep.trials or sweep.finals.num_open():
        show(f"the time is over; {_go_on(argv)}")
    if not any(outcome.score is not None for outcome in outcomes):
        failed = [outcome.error for outcome in outcomes if outcome.error]
        raise UserError(f"no trial has finished{': ' + failed[0] if failed else ''}")
    winner, fresh = sweep.winner(), sweep.fresh_scores()
    for index, scores in sorted(fresh.items()):
        show(f"trial {index:<4} on fresh seeds: {', '.join(f'{score:.4g}' for score in scores)}")
    best = sweep.write_best()
    show(f"best is trial {winner.index}{', the settings it started from' if winner.index == 0 else ''}")
    train = f"holdfast train --preset {shlex.quote(str(best))}{allow_imports_flag(sweep.base)}"
    rows = [("settings", str(best)), ("train", train), *_plots(sweep)]
    show(*(f"{name:10}  {text}" for name, text in rows))


def _go_on(argv: list[str]) -> str:
    return f"continue with   {shlex.join(['holdfast', 'sweep', *map(without_password, argv)])}"


def _plots(sweep: Any) -> list[tuple[str, str]]:
    from holdfast.display.plot_sweep import Axis, plot_importances, plot_parallel

    rows: list[tuple[str, str]] = []
    trials = [outcome for outcome in sweep.search.outcomes() if outcome.score is not None]
    axes = [Axis(p.label, p.choices, p.scale != "linear") for p in sweep.space]
    values = [
        (o.score, [o.settings[p.name] if p.choices else p.number(o.settings[p.name]) for p in sweep.space])
        for o in trials
    ]
    try:
        if len(trials) > 1:
            rows.append(("trials", str(plot_parallel(axes, values, sweep.folder / "parallel.png"))))
        importances = sweep.search.importances()
        if importances:
            rows.append(("importance", str(plot_importances(importances, sweep.folder / "importance.png"))))
    except ModuleNotFoundError as missing:
        show(missing)
    return rows
