"""`holdfast train`: settings from presets, files and flags; then a new run, several seeds, or a resumed run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.flags import value_of
from holdfast.cli.run import callbacks, has_its_steps_already, run_and_report, train_one
from holdfast.cli.seeds import train_seeds
from holdfast.cli.settings import defaults_from, parse_with_settings, require_imports_allowed, require_one_source
from holdfast.config import RunConfig


@dataclass
class TrainFlags:
    """Train a policy. Settings come from --preset or --config where given, and from the flags below.

    holdfast train --preset repeat-previous-easy

    holdfast train --env CartPole-v1 --mask-velocity --core gru --total-steps 500000

    holdfast train --env my_module:MyEnv --policy my_module:MyPolicy --seeds 1 2 3

    holdfast train --algorithm pqn --env CartPole-v1 --mask-velocity

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


def main(argv: list[str]) -> int:
    sources = {flag: value_of(argv, flag) for flag in ("--preset", "--config", "--resume")}
    require_one_source(list(sources.items()))
    if sources["--resume"] is not None:
        if not sources["--resume"]:
            raise UserError("--resume needs a run folder, but its value is empty")
        _resume(argv, Path(sources["--resume"]))
    else:
        with user_errors():
            defaults = defaults_from(argv, sources["--preset"], sources["--config"])
        _start(argv, defaults, sources["--config"] or sources["--preset"])
    return 0


# --- new runs ---------------------------------------------------------------------------------------------------------


def _start(argv: list[str], defaults: RunConfig, config_file: str | None) -> None:
    flags, config = parse_with_settings(TrainFlags, argv, "train", defaults)
    if config_file:
        require_imports_allowed(argv, config, Path(config_file), flags.allow_imports)
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


# --- resumed runs -----------------------------------------------------------------------------------------------------


def _resume(argv: list[str], run: Path) -> None:
    from holdfast.distributed import ranks as distributed
    from holdfast.envs.user_envs import is_object_name
    from holdfast.runs import checkpoint, saved_policy
    from holdfast.training.trainer import Trainer, require_resumable

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
        before = saved_policy.settings(file, saved, "--allow-imports" in argv)
        before.run_dir = str(checkpoint.run_of(file))  # not the folder that the file names
    # What the run's program passed as an object, and what must therefore be named again.
    ask_for = {"env": is_object_name(before.env), "policy": not saved["own_policy"]}
    missing = [name for name, unknown in ask_for.items() if unknown]
    flags, after = parse_with_settings(TrainFlags, argv, "train", before)
    old, new = before.to_dict(), after.to_dict()
    changed = {name: value for name, value in new.items() if value != old[name]}
    asked_for = {name: changed.pop(name) for name in missing if name in changed}
    with user_errors():
        require_resumable(before, dataclasses.replace(after, **{name: getattr(before, name) for name in asked_for}))
    if value_of(argv, "--total-steps") and after.num_updates <= saved["update"]:
        raise UserError(has_its_steps_already(saved["steps"]))
    require_imports_allowed(argv, after, file, flags.allow_imports)
    with user_errors():
        changed["run_dir"] = after.run_dir
        options: dict[str, Any] = {**asked_for, **changed}
        trainer = Trainer.resume(file, callbacks=callbacks(flags.profile), allow_imports=True, **options)
    run_and_report(trainer)
