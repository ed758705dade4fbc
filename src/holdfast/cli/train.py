"""`holdfast train`: settings from presets, files and flags; then a new run, several seeds, or a resumed run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.flags import named_values, parse, value_of
from holdfast.cli.run import callbacks, has_its_steps_already, run_and_report, train_one
from holdfast.cli.seeds import train_seeds
from holdfast.config import PRESETS, TrainConfig, flag_of


@dataclass
class Settings(TrainConfig):
    """Settings of a training run."""

    core: str = TrainConfig.core  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Accept everything: the values are checked together when a `TrainConfig` is made from them."""


@dataclass
class TrainFlags:
    """Train a policy. Settings come from --preset or --config where given, and from the flags below.

    holdfast train --preset repeat-previous-easy

    holdfast train --env CartPole-v1 --mask-velocity --core gru --total-steps 500000

    holdfast train --env my_module:MyEnv --policy my_module:MyPolicy --seeds 1 2 3

    holdfast train --resume runs/CartPole-v1/gru-mask-velocity-seed1
    """

    preset: str | None = None
    """Settings that solve a task: a name, which `holdfast envs` lists, or a file, such as `holdfast sweep` writes."""
    config: Path | None = None
    """Rerun the settings of a run: its config.json."""
    resume: Path | None = None
    """Continue a run: its folder, or one of its checkpoints."""
    seeds: tuple[int, ...] = ()
    """Train one run per seed, in parallel on CPUs, and plot all of them."""
    env_args: tuple[str, ...] = ()
    """Arguments for the environment's constructor, as name=value."""
    allow_imports: bool = False
    """Import modules that the file of --config or --resume names, which runs their code."""
    num_envs_per_rank: int | None = None
    """Environments per process under torchrun, instead of --num-envs, which is the total."""
    profile: bool = False
    """After warm-up, measure where the time of some updates goes and write a trace of a few; then continue training."""
    settings: Settings = field(default_factory=Settings)


def main(argv: list[str]) -> int:
    sources = {flag: value_of(argv, flag) for flag in ("--preset", "--config", "--resume")}
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} cannot be combined; give one of them")
    if sources["--resume"] is not None:
        if not sources["--resume"]:
            raise UserError("--resume needs a run folder, but its value is empty")
        _resume(argv, Path(sources["--resume"]))
    else:
        with user_errors():
            defaults = defaults_from(sources["--preset"], sources["--config"])
        _start(argv, defaults, sources["--config"] or sources["--preset"])
    return 0


# --- new runs ---------------------------------------------------------------------------------------------------------


def _start(argv: list[str], defaults: TrainConfig, config_file: str | None) -> None:
    flags, config = _parse(argv, TrainFlags(), defaults)
    if config_file:
        _require_imports_allowed(argv, config, Path(config_file), flags.allow_imports)
    if flags.num_envs_per_rank is not None:
        with user_errors():
            config = dataclasses.replace(config, num_envs=_envs_of_all_ranks(argv, flags.num_envs_per_rank))
    if flags.seeds and value_of(argv, "--seed") is not None:
        raise UserError("--seed and --seeds cannot be combined; name all seeds with --seeds")
    if flags.seeds and config.run_dir:
        raise UserError("--run-dir is one folder, but --seeds makes several runs; use --name, or leave it out")
    with user_errors():
        configs = [dataclasses.replace(config, seed=seed) for seed in flags.seeds or (config.seed,)]
    if flags.seeds and config.name is not None:
        configs = [dataclasses.replace(each, name=f"{each.name}-seed{each.seed}") for each in configs]
    if len(configs) == 1:
        train_one(configs[0], flags.profile)
    elif flags.profile:
        raise UserError("--profile measures one run; leave out --seeds, or name one seed")
    else:
        train_seeds(configs)


def _envs_of_all_ranks(argv: list[str], per_rank: int) -> int:
    from holdfast.distributed import ranks as distributed

    if value_of(argv, "--num-envs"):
        raise UserError("--num-envs is the total, --num-envs-per-rank the number per process; give one of them")
    if per_rank < 1:
        raise UserError(f"--num-envs-per-rank {per_rank}: expected at least 1")
    return per_rank * distributed.launched_ranks()


def _require_imports_allowed(argv: list[str], config: TrainConfig, source: Path, allowed: bool) -> None:
    from holdfast.config import imports

    with user_errors():
        typed = tuple(value_of(argv, flag) for flag in ("--env", "--core", "--policy"))
        imports.require_allowed(config, source, allowed, typed)


def defaults_from(preset: str | None, config_file: str | None) -> TrainConfig:
    """The settings that flags change: of a preset, of a file, or the defaults."""
    if "" in (preset, config_file):
        raise ValueError("--preset and --config need a name or a file, but the value is empty")
    if preset and preset not in PRESETS and Path(preset).suffix == ".json":
        preset, config_file = None, preset
    if preset:
        return TrainConfig.preset(preset)
    if config_file:
        path = Path(config_file)
        config = TrainConfig.load(path / "config.json" if path.is_dir() else path)
        config.run_dir = None  # that of the earlier run
        if re.fullmatch(
            rf"({re.escape(config.automatic_name)}|{re.escape(config.plain_name)})(-\d+)?", config.name or ""
        ):
            config.name = None  # nobody chose it: take the next free one
        return config
    return TrainConfig()


# --- resumed runs -----------------------------------------------------------------------------------------------------


def _resume(argv: list[str], run: Path) -> None:
    from holdfast.distributed import ranks as distributed
    from holdfast.envs.user_envs import is_object_name
    from holdfast.runs import checkpoint, saved_policy
    from holdfast.runs.folder import FIXED_ON_RESUME
    from holdfast.training.trainer import Trainer

    if value_of(argv, "--seeds"):
        raise UserError("--resume continues one run; --seeds starts several")
    if value_of(argv, "--num-envs-per-rank"):
        raise UserError(
            "--resume keeps the run's environments and distributes them over its ranks; leave out --num-envs-per-rank"
        )
    with user_errors():
        if distributed.restarted() and run.parent.name == checkpoint.folder_of(run).name:
            run = run.parent.parent  # started from one checkpoint; there may be later ones by now
        file, saved = saved_policy.read(run)
        before = TrainConfig.from_dict(saved["config"])
        before.run_dir = str(checkpoint.run_of(file))  # not the folder that the file names
    # What the run's program passed as an object, and what must therefore be named again.
    ask_for = {"env": is_object_name(before.env), "policy": not saved["own_policy"]}
    missing = [name for name, unknown in ask_for.items() if unknown]
    flags, after = _parse(argv, TrainFlags(resume=run), before)
    old, new = before.to_dict(), after.to_dict()
    changed = {name: value for name, value in new.items() if value != old[name]}
    asked_for = {name: changed.pop(name) for name in missing if name in changed}
    fixed = [name for name in changed if name in FIXED_ON_RESUME]
    if fixed:
        raise UserError(f"{flag_of(fixed[0])} cannot change when a run is resumed; start a new run with it")
    if value_of(argv, "--total-steps") and after.num_updates <= saved["update"]:
        raise UserError(has_its_steps_already(saved["steps"]))
    _require_imports_allowed(argv, after, file, flags.allow_imports)
    with user_errors():
        changed["run_dir"] = after.run_dir
        options: dict[str, Any] = {**asked_for, **changed}
        trainer = Trainer.resume(file, callbacks=callbacks(flags.profile), allow_imports=True, **options)
    run_and_report(trainer)


# --- settings ---------------------------------------------------------------------------------------------------------


def _parse(argv: list[str], flags: TrainFlags, defaults: TrainConfig) -> tuple[TrainFlags, TrainConfig]:
    """The flags, and the settings that they make of the defaults."""
    flags = dataclasses.replace(flags, settings=Settings(**{**vars(defaults), "env_kwargs": {}}))
    flags = parse(TrainFlags, argv, "train", default=flags)
    return flags, config_from(flags.settings, flags.env_args, defaults)


def config_from(settings: Settings, env_args: Sequence[str], defaults: TrainConfig) -> TrainConfig:
    """The config of flags that were parsed."""
    env_kwargs = {**defaults.env_kwargs, **named_values("--env-args", env_args, "length=40")}
    with user_errors():
        return TrainConfig(**{**vars(settings), "env_kwargs": env_kwargs})
