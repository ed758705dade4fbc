"""The command `holdfast`: train, eval, plot, envs, doctor, export, info.

A command is a function of its arguments that returns an exit code. What a user can get wrong ends in one line and
exit code 2; HOLDFAST_TRACEBACK=1 shows where it came from. Heavy imports happen inside the commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from holdfast.config import TrainConfig

Flags = TypeVar("Flags")

HELP = """\
usage: holdfast COMMAND [OPTIONS]

Reinforcement-learning policies that remember.

  train    train a policy           holdfast train --preset repeat-previous-easy
  eval     measure a trained one    holdfast eval RUN --episodes 200
  plot     draw learning curves     holdfast plot RUN RUN ... -o curves.png
  envs     list environments        holdfast envs
  doctor   examine a policy         holdfast doctor TARGET
  export   write a policy to ONNX   holdfast export RUN
  info     versions and devices     holdfast info

RUN is a run folder, such as runs/RepeatPreviousEasy-v0/lstm-seed1, or one of its checkpoints.
`holdfast COMMAND --help` lists the options of a command."""


class Mistake(Exception):
    """Something the user can put right; the message says how."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if arguments[0] in ("-V", "--version"):
        from holdfast import __version__

        print(f"holdfast {__version__}")
        return 0
    name = arguments[0]
    try:
        if name not in COMMANDS:
            likely = get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean {likely[0]}?" if likely else f"one of {', '.join(COMMANDS)}"
            raise Mistake(f"no command {name!r}; {hint}")
        return COMMANDS[name](arguments[1:])
    except Mistake as mistake:
        if os.environ.get("HOLDFAST_TRACEBACK"):
            raise
        prefix = f"holdfast {name}" if name in COMMANDS else "holdfast"
        print(f"{prefix}: {' '.join(str(mistake).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# --- train ------------------------------------------------------------------------------------------------------


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
    """Several runs, one per seed, and one plot of all."""
    env_args: tuple[str, ...] = ()
    """Arguments for the environment's constructor, as name=value."""
    settings: TrainConfig = field(default_factory=TrainConfig)


# A resumed run keeps what its weights, its rollouts and its place were made with.
_FIXED_ON_RESUME = (
    "env", "env_kwargs", "core", "hidden_size", "num_layers", "critic_core", "reset", "encoder_sizes", "head_sizes",
    "activation", "inputs", "num_envs", "num_steps", "mask_velocity", "normalize_obs", "normalize_reward", "seed",
    "name",
)  # fmt: skip


def train(argv: list[str]) -> int:
    """Train, then say what came of it and what to do next."""
    preset, config_file, resume = (_value_of(argv, flag) for flag in ("--preset", "--config", "--resume"))
    given = [flag for flag in ("--preset", "--config", "--resume") if _value_of(argv, flag)]
    if len(given) > 1:
        raise Mistake(f"{' and '.join(given)} exclude each other; give one of them")
    if resume and _value_of(argv, "--seeds"):
        raise Mistake("--resume goes on with one run; --seeds starts several")
    if resume:
        return _train_on(argv, Path(resume))
    with _mistakes():
        defaults = _defaults(preset, config_file)
    flags = _parse(TrainFlags, argv, "train", default=TrainFlags(settings=dataclasses.replace(defaults, env_kwargs={})))
    flags.settings.env_kwargs = {**defaults.env_kwargs, **_env_args(flags.env_args)}
    if flags.seeds and flags.settings.run_dir:
        raise Mistake("--run-dir is one folder, --seeds are several runs; use --name, or leave it out")
    configs = [dataclasses.replace(flags.settings, seed=seed) for seed in flags.seeds or (flags.settings.seed,)]
    runs = [_train_one(_with_free_folder(config, flags.seeds)) for config in configs]
    if len(runs) > 1:
        out = _draw(runs, runs[0].parent / "seeds.png")
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


def _train_on(argv: list[str], run: Path) -> int:
    from holdfast import checkpoint
    from holdfast.trainer import Trainer

    with _mistakes():
        file, saved = checkpoint.load_from(run)
        before = TrainConfig.from_dict(saved["config"])
        if file.parent.name == checkpoint.folder_of(run).name:
            before.run_dir = str(file.parent.parent)  # where it is now, not where it was
    default = TrainFlags(resume=run, settings=dataclasses.replace(before, env_kwargs={}))
    flags = _parse(TrainFlags, argv, "train", default=default)
    after = {**flags.settings.to_dict(), "env_kwargs": {**before.env_kwargs, **_env_args(flags.env_args)}}
    changed = {key: value for key, value in after.items() if value != before.to_dict()[key]}
    fixed = [key for key in changed if key in _FIXED_ON_RESUME]
    if fixed:
        raise Mistake(f"--{fixed[0].replace('_', '-')} cannot change when a run is resumed; start a new run with it")
    with _mistakes():
        trainer = Trainer.resume(file, **{**changed, "run_dir": after["run_dir"]})
    _run(trainer)
    return 0


def _train_one(config: TrainConfig) -> Path:
    from holdfast.trainer import Trainer

    with _mistakes():
        trainer = Trainer(config)
    return _run(trainer)


def _run(trainer: Any) -> Path:
    """Run a trainer and print the result; the run folder."""
    from holdfast.dashboard import clock, compact, number
    from holdfast.replay_check import ReplayError

    config = trainer.config
    earlier_steps, earlier_seconds = trainer.steps, trainer.seconds
    try:
        result = trainer.run()
    except (ReplayError, FileExistsError, ModuleNotFoundError) as error:
        raise Mistake(str(error)) from error
    run = result.run_dir
    seconds = result.seconds - earlier_seconds
    speed = (result.steps - earlier_steps) / seconds if seconds > 0 else 0.0
    plus_minus = f" ± {number(result.std_error)}" if config.final_eval_episodes > 1 else ""
    print(
        f"return {number(result.mean_return)}{plus_minus} over {config.final_eval_episodes} fresh episodes, after "
        f"{compact(result.steps)} steps; trained {clock(seconds)} ({seconds:.1f} s, {speed:,.0f} steps/s)"
    )
    if config.quiet:
        return run
    more = f"holdfast train --resume {run}"
    curve = _draw([run], run / "curve.png")
    lines = [("run", str(run)), *([("curve", str(curve))] if curve else [])]
    if result.updates < config.num_updates:
        why = {
            "interrupt": "stopped by Ctrl-C",
            "target": "the target was reached",
            "callback": "stopped by a callback",
        }
        lines.append((why.get(result.stopped_by, result.stopped_by), f"go on with   {more}"))
    else:
        lines.append(("train on", f"{more} --total-steps {2 * config.total_steps}"))
    lines += [("measure", f"holdfast eval {run}"), ("compare", f"holdfast plot {run.parent}/* -o curves.png")]
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name.ljust(width)}  {text}" for name, text in lines))
    return run


def _draw(runs: list[Path], out: Path) -> Path | None:
    """A plot where there is something to plot and something to plot with."""
    from holdfast.plot import plot_runs

    try:
        return plot_runs(runs, out)
    except ModuleNotFoundError as missing:
        print(missing)
    except ValueError:  # no episode has ended yet
        pass
    return None


def _with_free_folder(config: TrainConfig, seeds: tuple[int, ...]) -> TrainConfig:
    """With --seeds, a name per seed; without a name or folder, the first that no run is in."""
    from holdfast.checkpoint import rolling

    if config.run_dir is None and config.name is not None and seeds:
        return dataclasses.replace(config, name=f"{config.name}-seed{config.seed}")
    if config.run_dir is not None or config.name is not None:
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
            raise Mistake(f"--env-args {pair!r}: expected name=value, such as length=40")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


# --- eval, plot, envs, doctor, export, info -----------------------------------------------------------------------


@dataclass
class EvalFlags:
    """Measure a trained policy over whole episodes; memory and resets are taken care of."""

    run: Path
    """A run folder, or one of its checkpoints."""
    episodes: int = 100
    """Episodes to play."""
    deterministic: bool = False
    """Take the most likely action instead of sampling."""
    num_envs: int | None = None
    """Environments that play at the same time; by default as many as in training, at most one per episode."""
    seed: int = 0
    """Of environments and sampling."""
    device: str = "cpu"
    """Where the policy runs: cpu or cuda."""
    video: Path | None = None
    """Folder for animated GIFs of three episodes, for environments that render."""


def evaluate(argv: list[str]) -> int:
    """Play episodes with a trained policy and report."""
    flags = _parse(EvalFlags, argv, "eval")
    import torch

    import holdfast as hf
    from holdfast import checkpoint, envs
    from holdfast.dashboard import compact, number

    with _mistakes():
        file, saved = checkpoint.load_from(flags.run)
        config = TrainConfig.from_dict(saved["config"])
        policy = hf.load(file, device=flags.device)
        env = envs.make(
            config.env,
            flags.num_envs or min(config.num_envs, max(1, flags.episodes)),
            device=flags.device,
            vectorization=config.vectorization,
            mask_velocity=config.mask_velocity,
            env_kwargs=config.env_kwargs,
        )
        half = config.precision == "bf16"
        with torch.autocast(torch.device(flags.device).type, torch.bfloat16, enabled=half):
            result = hf.evaluate(
                policy,
                env,
                flags.episodes,
                deterministic=flags.deterministic,
                seed=flags.seed,
                inputs=config.inputs,
            )
    actions = "most likely actions" if flags.deterministic else "sampled actions"
    print(f"{file}: {config.env}, {config.core}, {compact(saved['steps'])} steps")
    print(
        f"return  {number(result.mean_return)} ± {number(result.std_error)} (mean, standard error), "
        f"{number(min(result.returns))} to {number(max(result.returns))}"
    )
    print(f"length  {number(result.mean_length, 1)} (mean), {min(result.lengths)} to {max(result.lengths)}")
    print(f"{flags.episodes} episodes, {actions}, seed {flags.seed}")
    if flags.video is not None:
        from holdfast.video import record_episodes

        with _mistakes():
            count = min(3, flags.episodes)
            paths = record_episodes(
                policy, config, flags.video, episodes=count, deterministic=flags.deterministic, seed=flags.seed
            )
        print("\n".join(f"video   {path}" for path in paths))
    return 0


@dataclass
class PlotFlags:
    """Draw learning curves: mean and 95% confidence interval over seeds, a panel per environment."""

    runs: tuple[Path, ...]
    """Run folders."""
    out: Path = Path("curves.png")
    """The PNG to write (-o)."""
    metric: str = "rollout/ep_rew_mean"
    """A column of progress.csv."""
    group: str = "auto"
    """Settings that make a group, such as core or core,hidden_size; auto takes those that differ."""


def plot(argv: list[str]) -> int:
    """Draw the curves of runs to a PNG."""
    flags = _parse(PlotFlags, ["--out" if argument == "-o" else argument for argument in argv], "plot")
    from holdfast.plot import plot_runs
    from holdfast.run_log import CSV_NAME

    with _mistakes():
        # A shell's runs/TMaze-v0/* has plots of earlier times in it; a folder of runs stands for its runs.
        folders = [run for run in flags.runs if run.is_dir() or not run.exists()]
        runs = [r for f in folders for r in ([f] if (f / CSV_NAME).exists() else _runs_below(f) or [f])]
        print(plot_runs(runs, flags.out, metric=flags.metric, group=flags.group))
    return 0


def _runs_below(folder: Path) -> list[Path]:
    from holdfast.run_log import CSV_NAME

    return sorted(path.parent for path in folder.rglob(CSV_NAME))


def envs(argv: list[str]) -> int:
    """List the environments that come with Holdfast, and say how to name others."""
    _parse(EnvsFlags, argv, "envs")
    from holdfast.config import PRESETS
    from holdfast.envs import list_envs

    rows = list_envs()
    columns = [("environment", *(r.id for r in rows)), ("length", *(r.episode_length for r in rows))]
    columns += [("chance", *(f"{r.chance_return:g}" for r in rows)), ("best", *(f"{r.solved_return:g}" for r in rows))]
    columns += [("what it asks", *(r.description for r in rows))]
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    print("\nOthers: any gymnasium id (CartPole-v1, package.module:MyEnv-v0), POPGym's as popgym:RepeatPreviousEasy.")
    print(f"Presets (holdfast train --preset NAME): {', '.join(PRESETS)}")
    return 0


@dataclass
class EnvsFlags:
    """List the environments that come with Holdfast."""


@dataclass
class DoctorFlags:
    """Examine a recurrent policy, of any library, for the mistakes that recurrent policies have.

    Exit codes: 0 healthy, 1 findings, 2 could not examine."""

    target: str
    """package.module:factory, sb3:model.zip, or run:runs/... (a run folder or checkpoint)."""
    html: Path | None = None
    """Write the report as a page."""
    json: str | None = None
    """Write the report as JSON; - prints it."""
    png: Path | None = None
    """Draw how far back gradients reach."""
    seed: int = 0
    """Of the data that the policy is examined on."""
    compile: bool = False
    """Examine it under torch.compile too."""
    tolerance: float | None = None
    """Largest difference that counts as equal; chosen by precision unless given."""
    quiet: bool = False
    """Print the verdict only."""


def doctor(argv: list[str]) -> int:
    """Examine a recurrent policy."""
    flags = _parse(DoctorFlags, argv, "doctor")
    from holdfast.checkpoint import CheckpointError
    from holdfast.doctor import command

    try:
        return command.main(**dataclasses.asdict(flags))
    except CheckpointError as error:
        raise Mistake(str(error)) from error


def export(argv: list[str]) -> int:
    """Write a trained policy to ONNX, state and all."""
    import importlib

    try:
        module = importlib.import_module("holdfast.export")
    except ModuleNotFoundError as missing:
        if missing.name and not missing.name.startswith("holdfast"):
            raise Mistake(f"needs {missing.name}: pip install 'holdfast[onnx]'") from missing
        from holdfast import __version__

        raise Mistake(f"holdfast {__version__} does not have this command yet") from missing
    return int(module.main(argv) or 0)


@dataclass
class InfoFlags:
    """Versions, devices, threads, CPU kernel, optional packages."""


def info(argv: list[str]) -> int:
    """Print what this machine and installation are."""
    _parse(InfoFlags, argv, "info")
    from holdfast.info import report

    lines = report()
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name.ljust(width)}  {text}" for name, text in lines))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "plot": plot,
    "envs": envs,
    "doctor": doctor,
    "export": export,
    "info": info,
}


# --- reading flags ------------------------------------------------------------------------------------------------


def _parse(kind: type[Flags], argv: list[str], name: str, default: Flags | None = None) -> Flags:
    """Flags of a command by tyro, whose several-line complaints become one line."""
    import tyro

    complaint = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                args=argv,
                prog=f"holdfast {name}",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs),
                **options,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise Mistake(_one_line(complaint.getvalue(), name)) from end


def _one_line(complaint: str, name: str) -> str:
    """The first part of a complaint (a box: title, parts with rules between them) and the flag it suggests."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", complaint)
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines()]
    ruled = ["\n" if set(line) <= set("─-") else line for line in lines[1:]]
    title, *parts = [lines[0].strip("─ "), *(" ".join(part.split()) for part in " ".join(ruled).split("\n"))]
    parts = [part for part in parts if part]
    what = parts[0] if parts else title
    what = re.sub(r"^Error parsing (\w+: )?", "", what)  # a flag's name helps, a class's does not
    what = re.sub(r"^Missing from [\w ]+: \S+ (.+?)\.? \(required\)", r"missing: \1", what)
    what = re.sub(r"invalid literal for int\(\) with base 10: (.+)", r"\1 is not an integer", what)
    what = re.sub(r"could not convert string to float: (.+)", r"\1 is not a number", what)
    likely = re.search(r"Perhaps you meant:\s+(--[\w-]+)", " ".join(parts[1:]))
    hint = f"; did you mean {likely[1]}?" if likely else f"; see holdfast {name} --help"
    return what.rstrip(".") + hint


def _value_of(argv: list[str], flag: str) -> str | None:
    """The value of a flag that decides how the others are read."""
    for i, argument in enumerate(argv):
        if argument == flag and i + 1 < len(argv):
            return argv[i + 1]
        if argument.startswith(flag + "="):
            return argument[len(flag) + 1 :]
    return None


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    """What goes wrong while things are set up is nearly always the user's to put right."""
    import gymnasium as gym

    from holdfast.checkpoint import CheckpointError

    try:
        yield
    except FileNotFoundError as error:
        raise Mistake(f"{error.filename}: there is no such file" if error.filename else str(error)) from error
    except json.JSONDecodeError as error:
        raise Mistake(f"this is no JSON file: {error}") from error
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, CheckpointError, gym.error.Error) as error:
        raise Mistake(str(error)) from error
