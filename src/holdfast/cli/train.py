"""`holdfast train`: settings from presets, files and flags; new runs, several seeds, resumed ones; their results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from holdfast.cli.flags import UserError, parse, user_errors, value_of
from holdfast.config import TrainConfig


@dataclass
class TrainFlags:
    """Train a policy. Settings come from --preset or --config where given, and from the flags below."""

    preset: str | None = None
    """Settings that solve a task, by name; `holdfast envs` lists them."""
    config: Path | None = None
    """Rerun the settings of a run: its config.json."""
    resume: Path | None = None
    """Go on with a run: its folder, or one of its checkpoints."""
    seeds: tuple[int, ...] = ()
    """Several runs, one per seed, side by side on CPUs, and one plot of all."""
    env_args: tuple[str, ...] = ()
    """Arguments for the environment's constructor, as name=value."""
    profile: bool = False
    """Say where the time of some updates after warm-up goes, and write a trace of a few; then train on."""
    settings: TrainConfig = field(default_factory=TrainConfig)


# A resumed run keeps what its weights, its rollouts and its place were made with.
_FIXED_ON_RESUME = (
    "env", "env_kwargs", "core", "hidden_size", "num_layers", "critic_core", "reset", "encoder_sizes", "head_sizes",
    "activation", "inputs", "num_envs", "num_steps", "mask_velocity", "normalize_obs", "normalize_reward", "seed",
    "name",
)  # fmt: skip


def train(argv: list[str]) -> int:
    """Train, then say what came of it and what to do next."""
    preset, config_file, resume = (value_of(argv, flag) for flag in ("--preset", "--config", "--resume"))
    given = [flag for flag in ("--preset", "--config", "--resume") if value_of(argv, flag)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other; give one of them")
    if resume and value_of(argv, "--seeds"):
        raise UserError("--resume goes on with one run; --seeds starts several")
    if resume:
        return _train_on(argv, Path(resume))
    with user_errors():
        defaults = _defaults(preset, config_file)
    flags = parse(TrainFlags, argv, "train", default=TrainFlags(settings=dataclasses.replace(defaults, env_kwargs={})))
    flags.settings.env_kwargs = {**defaults.env_kwargs, **_env_args(flags.env_args)}
    if flags.seeds and flags.settings.run_dir:
        raise UserError("--run-dir is one folder, --seeds are several runs; use --name, or leave it out")
    configs = [dataclasses.replace(flags.settings, seed=seed) for seed in flags.seeds or (flags.settings.seed,)]
    configs = [_with_free_folder(config, flags.seeds) for config in configs]
    if len(configs) > 1:
        if flags.profile:
            raise UserError("--profile looks at one run; leave out --seeds, or name one seed")
        return _train_seeds(configs)
    _train_one(configs[0], flags.profile)
    return 0


def _train_seeds(configs: list[TrainConfig]) -> int:
    """Several seeds: side by side on CPUs, one after another on a GPU; then all of them together."""
    import numpy as np

    from holdfast.cli import seeds as sweep
    from holdfast.display.aggregate import bootstrap_interval, interquartile_mean
    from holdfast.display.dashboard import number
    from holdfast.distributed import ranks as distributed
    from holdfast.runs.log import RESULT_NAME

    if len({config.seed for config in configs}) < len(configs):
        raise UserError("--seeds names a seed twice; every run needs its own")
    if distributed.launched():
        raise UserError("--seeds starts processes of its own; leave torchrun out, or train one seed")
    with user_errors():
        on_gpu = distributed.pick_device(configs[0].device).type == "cuda"
    problems = []
    if on_gpu:
        for config in configs:
            _train_one(config)
    else:
        if not configs[0].quiet:
            print(f"{len(configs)} seeds, {min(len(configs), sweep.cores())} at a time, in {configs[0].folder.parent}")
        for config, said, problem in sweep.train_side_by_side(configs):
            print(f"seed {config.seed}  {problem or said}", flush=True)
            problems += [f"seed {config.seed}: {problem}"] if problem else []
    if problems:
        raise UserError("; ".join(problems))
    runs = [config.folder for config in configs]
    scores = np.array([json.loads((run / RESULT_NAME).read_text())["mean_return"] for run in runs])
    low, high = bootstrap_interval([scores])
    print(
        f"return {number(float(interquartile_mean(scores)))} [{number(low)}, {number(high)}] over {len(runs)} seeds "
        "(interquartile mean, 95% bootstrap interval)"
    )
    out = _draw(runs, runs[0].parent / "seeds.png", aggregate="iqm")
    print(f"all seeds  {out}" if out else "")
    return 0


def _defaults(preset: str | None, config_file: str | None) -> TrainConfig:
    if preset:
        return TrainConfig.preset(preset)
    if config_file:
        path = Path(config_file)
        config = TrainConfig.load(path / "config.json" if path.is_dir() else path)
        config.run_dir = None  # the folder of the run it came from
        return config
    return TrainConfig()


def read_checkpoint(run: Path) -> tuple[Path, dict[str, Any], TrainConfig]:
    """A run's newest checkpoint (or the one named): where it is, what is in it, and the settings it was made with."""
    from holdfast.runs import checkpoint

    file, saved = checkpoint.load_from(run)
    if "config" not in saved:
        raise checkpoint.CheckpointError(f"{file}: no trainer wrote this checkpoint; it has no settings")
    return file, saved, TrainConfig.from_dict(saved["config"])


def _train_on(argv: list[str], run: Path) -> int:
    from holdfast.distributed import ranks as distributed
    from holdfast.runs import checkpoint
    from holdfast.training.trainer import Trainer

    with user_errors():
        if distributed.restarted() and run.parent.name == checkpoint.folder_of(run).name:
            run = run.parent.parent  # begun from one checkpoint, and since then there may be later ones
        file, _, before = read_checkpoint(run)
        if file.parent.name == checkpoint.folder_of(run).name:
            before.run_dir = str(file.parent.parent)  # where it is now, not where it was
    default = TrainFlags(resume=run, settings=dataclasses.replace(before, env_kwargs={}))
    flags = parse(TrainFlags, argv, "train", default=default)
    after = {**flags.settings.to_dict(), "env_kwargs": {**before.env_kwargs, **_env_args(flags.env_args)}}
    changed = {key: value for key, value in after.items() if value != before.to_dict()[key]}
    fixed = [key for key in changed if key in _FIXED_ON_RESUME]
    if fixed:
        raise UserError(f"--{fixed[0].replace('_', '-')} cannot change when a run is resumed; start a new run with it")
    with user_errors():
        trainer = Trainer.resume(file, callbacks=_watching(flags.profile), **{**changed, "run_dir": after["run_dir"]})
    _run(trainer)
    return 0


def _watching(profile: bool) -> list[Any]:
    if not profile:
        return []
    from holdfast.profiling.profile import Profile

    return [Profile()]


def _train_one(config: TrainConfig, profile: bool = False) -> Path:
    from holdfast.distributed import ranks as distributed
    from holdfast.runs import checkpoint
    from holdfast.training.trainer import Trainer

    with user_errors():
        ranks, device = distributed.join(config.device)
        # torchrun may have begun this job again; all ranks must then go on, or none.
        if distributed.begun_again(ranks, device) and ranks.from_leader(bool(checkpoint.rolling(config.folder))):
            trainer = Trainer.resume(config.folder, callbacks=_watching(profile))
        else:
            trainer = Trainer(config, callbacks=_watching(profile))
    return _run(trainer)


def _run(trainer: Any) -> Path:
    """Run a trainer and print the result; the run folder."""
    from holdfast.display.dashboard import clock, compact, number
    from holdfast.rollout.env_failures import EnvFailedError
    from holdfast.runs.log import RESULT_NAME, RunFolderError, write_result
    from holdfast.training.nonfinite import NonFiniteError
    from holdfast.training.replay_check import ReplayError

    config = trainer.config
    earlier_steps, earlier_seconds = trainer.steps, trainer.seconds
    try:
        result = trainer.run()
    except (
        ReplayError, NonFiniteError, EnvFailedError, FileExistsError, RunFolderError, ModuleNotFoundError
    ) as error:  # fmt: skip
        raise UserError(str(error)) from error
    run = result.run_dir
    if not trainer.ranks.leads:
        return run
    try:
        write_result(run, {**dataclasses.asdict(result), "run_dir": str(run)})
    except OSError as error:  # the numbers are printed below all the same
        print(f"{RESULT_NAME} could not be written: {error}")
    seconds = result.seconds - earlier_seconds
    speed = (result.steps - earlier_steps) / seconds if seconds > 0 else 0.0
    plus_minus = f" ± {number(result.std_error)}" if config.final_eval_episodes > 1 else ""
    print(
        f"return {number(result.mean_return)}{plus_minus} over {config.final_eval_episodes} fresh episodes, after "
        f"{compact(result.steps)} steps; trained {clock(seconds)} ({seconds:.1f} s, {speed:,.0f} steps/s)"
    )
    if config.quiet:
        return run
    saved = trainer.saved_elsewhere or run
    more = f"holdfast train --resume {saved}"
    curve = _draw([run], run / "curve.png")
    lines = [("run", str(run)), *([("curve", str(curve))] if curve else [])]
    lines += [("profile", str(watch.table)) for watch in trainer.callbacks if getattr(watch, "table", None)]
    if result.updates < config.num_updates:
        why = {
            "interrupt": "stopped by Ctrl-C",
            "target": "the target was reached",
            "callback": "stopped by a callback",
        }
        lines.append((why.get(result.stopped_by, result.stopped_by), f"go on with   {more}"))
    else:
        lines.append(("train on", f"{more} --total-steps {2 * config.total_steps}"))
    lines += [("measure", f"holdfast eval {saved}"), ("compare", f"holdfast plot {run.parent}/* -o curves.png")]
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name.ljust(width)}  {text}" for name, text in lines))
    return run


def _draw(runs: list[Path], out: Path, aggregate: Literal["mean", "iqm"] = "mean") -> Path | None:
    """A plot where there is something to plot and something to plot with."""
    from holdfast.display.plot import plot_runs

    try:
        return plot_runs(runs, out, aggregate=aggregate)
    except ModuleNotFoundError as missing:
        print(missing)
    except OSError as error:
        out.unlink(missing_ok=True)
        print(f"{out} could not be drawn: {error}")
    except ValueError:  # no episode has ended yet
        pass
    return None


def _with_free_folder(config: TrainConfig, seeds: tuple[int, ...]) -> TrainConfig:
    """With --seeds, a name per seed; without a name or folder, the first that no run is in."""
    from holdfast.distributed import ranks as distributed
    from holdfast.runs.checkpoint import rolling

    if config.run_dir is None and config.name is not None and seeds:
        return dataclasses.replace(config, name=f"{config.name}-seed{config.seed}")
    # The ranks of a job, and the same job begun again, must all mean the same folder.
    if config.run_dir is not None or config.name is not None or distributed.launched():
        return config
    base, number = config.folder.name, 1
    while rolling(config.folder):
        number += 1
        config = dataclasses.replace(config, name=f"{base}-{number}")
    return config


def _env_args(pairs: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--env-args {pair!r}: expected name=value, such as length=40")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found
