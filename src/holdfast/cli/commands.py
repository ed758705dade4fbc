"""The command `holdfast`: train, eval, plot, envs, doctor, export, info.

A command is a function of its arguments that returns an exit code. What a user can get wrong ends in one line and
exit code 2; HOLDFAST_TRACEBACK=1 shows where it came from. Heavy imports happen inside the commands.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from holdfast.cli.flags import UserError, parse, user_errors
from holdfast.cli.train import read_checkpoint, train

HELP = """\
usage: holdfast COMMAND [OPTIONS]

Reinforcement-learning policies that remember.

  train    train a policy           holdfast train --preset repeat-previous-easy
  eval     measure a trained one    holdfast eval RUN --episodes 200
  plot     draw learning curves     holdfast plot RUN RUN ... -o curves.png
  envs     list environments        holdfast envs
  doctor   examine a policy         holdfast doctor TARGET
  export   write a policy to ONNX   holdfast export RUN -o policy.onnx
  info     versions and devices     holdfast info

RUN is a run folder, such as runs/RepeatPreviousEasy-v0/lstm-seed1, or one of its checkpoints.
`holdfast COMMAND --help` lists the options of a command."""


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
            raise UserError(f"no command {name!r}; {hint}")
        return COMMANDS[name](arguments[1:])
    except UserError as mistake:
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
    flags = parse(EvalFlags, argv, "eval")
    import torch

    import holdfast as hf
    from holdfast import envs
    from holdfast.display.dashboard import compact, number

    with user_errors():
        file, saved, config = read_checkpoint(flags.run)
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
        from holdfast.training.video import record_episodes

        with user_errors():
            count = min(3, flags.episodes)
            paths = record_episodes(
                policy, config, flags.video, episodes=count, deterministic=flags.deterministic, seed=flags.seed
            )
        print("\n".join(f"video   {path}" for path in paths))
    return 0


@dataclass
class PlotFlags:
    """Draw learning curves: mean and 95% interval over seeds, a panel per environment."""

    runs: tuple[Path, ...]
    """Run folders."""
    out: Path = Path("curves.png")
    """The PNG to write (-o)."""
    metric: str = "rollout/ep_rew_mean"
    """A column of progress.csv."""
    group: str = "auto"
    """Settings that make a group, such as core or core,hidden_size; auto takes those that differ."""
    aggregate: Literal["mean", "iqm"] = "mean"
    """Over seeds: the mean with Student's interval, or the interquartile mean with a bootstrap interval."""


def plot(argv: list[str]) -> int:
    """Draw the curves of runs to a PNG."""
    flags = parse(PlotFlags, ["--out" if argument == "-o" else argument for argument in argv], "plot")
    from holdfast.display.plot import plot_runs
    from holdfast.runs.log import CSV_NAME

    with user_errors():
        # A shell's runs/TMaze-v0/* has plots of earlier times in it; a folder of runs stands for its runs.
        folders = [run for run in flags.runs if run.is_dir() or not run.exists()]
        runs = [r for f in folders for r in ([f] if (f / CSV_NAME).exists() else _runs_below(f) or [f])]
        print(plot_runs(runs, flags.out, metric=flags.metric, group=flags.group, aggregate=flags.aggregate))
    return 0


def _runs_below(folder: Path) -> list[Path]:
    from holdfast.runs.log import CSV_NAME

    return sorted(path.parent for path in folder.rglob(CSV_NAME))


def envs(argv: list[str]) -> int:
    """List the environments that come with Holdfast, and say how to name others."""
    parse(EnvsFlags, argv, "envs")
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
    flags = parse(DoctorFlags, argv, "doctor")
    from holdfast.cli import doctor as command
    from holdfast.runs.checkpoint import CheckpointError

    try:
        return command.main(**dataclasses.asdict(flags))
    except CheckpointError as error:
        raise UserError(str(error)) from error


def export(argv: list[str]) -> int:
    """Write a trained policy to one file for other programs, state and all."""
    from holdfast.deploy.export import main as write

    return write(argv)


@dataclass
class InfoFlags:
    """Versions, devices, threads, CPU kernel, optional packages."""


def info(argv: list[str]) -> int:
    """Print what this machine and installation are."""
    parse(InfoFlags, argv, "info")
    from holdfast.runs.metadata import report

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
