"""Running a trainer from the command line: train one config, then print the result and what to do next."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.cli.errors import UserError, raised_by_holdfast, user_errors
from holdfast.config import RunConfig
from holdfast.shown_text import show

if TYPE_CHECKING:
    from holdfast.training.trainer import Trainer, TrainResult

_STOPPED_BY = {
    "interrupt": "stopped by Ctrl-C",
    "target": "the target was reached",
    "callback": "stopped by a callback",
}


def train_one(config: RunConfig, profile: bool = False) -> TrainResult | None:
    """Train a new run, or continue it where torchrun has restarted the job. Returns the result on rank 0."""
    from holdfast.distributed import ranks as distributed
    from holdfast.runs import checkpoint
    from holdfast.training.trainer import Trainer

    with user_errors():
        ranks, device = distributed.join(config.device)
        # If torchrun restarted this job, all ranks must resume, or none.
        if distributed.any_restarted(ranks, device) and ranks.from_leader(bool(checkpoint.rolling(config.folder))):
            trainer = Trainer.resume(config.folder, callbacks=callbacks(profile), allow_imports=True)
        else:
            trainer = Trainer(config, callbacks=callbacks(profile))
    return run_and_report(trainer)


def callbacks(profile: bool) -> list[Any]:
    if not profile:
        return []
    from holdfast.profiling.profile import Profile

    return [Profile()]


def run_and_report(trainer: Trainer) -> TrainResult | None:
    """Run a trainer; rank 0 then writes result.json, prints the result, draws the curve, and returns the result."""
    from holdfast.distributed.ranks import RankLostError
    from holdfast.rollout.env_failures import EnvFailedError
    from holdfast.runs.log import RESULT_NAME, RunFolderError, write_result
    from holdfast.training.nonfinite import NonFiniteError
    from holdfast.training.replay_check import ReplayError

    earlier_steps, earlier_seconds = trainer.steps, trainer.seconds
    try:
        result = trainer.run()
    except (
        ReplayError, NonFiniteError, EnvFailedError, FileExistsError, RunFolderError, ModuleNotFoundError, RankLostError
    ) as error:  # fmt: skip
        raise UserError(str(error)) from error
    except (ValueError, TypeError) as error:
        if not raised_by_holdfast(error):  # the user's own code: the traceback shows where
            raise
        raise UserError(f"{error} (HOLDFAST_TRACEBACK=1 shows where)") from error
    if not trainer.ranks.leads:
        return None
    run = result.run_dir
    try:
        write_result(run, {**dataclasses.asdict(result), "run_dir": str(run)})
    except OSError as error:  # the numbers are printed below
        show(f"{RESULT_NAME} could not be written: {error}")
    show(_result_line(trainer.config, result, result.steps - earlier_steps, result.seconds - earlier_seconds))
    rows = [("run", str(run))] if trainer.config.quiet else _next_steps(trainer, result)
    width = max(len(name) for name, _ in rows)
    show(*(f"{name.ljust(width)}  {text}" for name, text in rows))
    return result


def has_its_steps_already(steps: int) -> str:
    """What is said of a run that is resumed and has nothing left to train."""
    return f"the run has {steps} steps already; to continue training, pass more, such as --total-steps {2 * steps}"


def _result_line(config: RunConfig, result: TrainResult, steps: int, seconds: float) -> str:
    """`steps` and `seconds` are those of this process, not of the parts before a resume."""
    from holdfast.display.dashboard import clock, compact, counted, number

    speed = steps / seconds if seconds > 0 else 0.0
    trained = f"after {compact(result.steps)} steps; trained {clock(seconds)} ({speed:,.0f} steps/s)"
    if not steps and result.updates >= config.num_updates:
        trained = f"nothing trained: {has_its_steps_already(result.steps)}"
    if not result.episodes:
        why = "no episode of the evaluation ended; give the environment a time limit"
        return f"return unknown ({why}), {trained}"
    plus_minus = f" ± {number(result.std_error)}" if result.episodes > 1 else ""
    open_ones = config.final_eval_episodes - result.episodes
    cut_off = f" ({open_ones} more did not end)" if open_ones else ""
    over = counted(result.episodes, "fresh episode")
    return f"return {number(result.mean_return)}{plus_minus} over {over}{cut_off}{result.actions and ', '}{result.actions}, {trained}"


def _next_steps(trainer: Trainer, result: TrainResult) -> list[tuple[str, str]]:
    """The files of a finished run, and commands that continue, measure and compare it."""
    from holdfast.config.imports import allow_imports_flag

    config, run = trainer.config, result.run_dir
    saved = shlex.quote(str(trainer.saved_elsewhere or run)) + allow_imports_flag(config)
    resume = f"holdfast train --resume {saved}"
    if trainer.saved_elsewhere:
        resume += f" --run-dir {shlex.quote(str(run))}"
    curve = draw([run], run / "curve.png")
    rows = [("run", str(run)), *([("curve", str(curve))] if curve else [])]
    rows += [("profile", str(callback.table)) for callback in trainer.callbacks if getattr(callback, "table", None)]
    if result.updates < config.num_updates:
        rows.append((_STOPPED_BY.get(result.stopped_by, result.stopped_by), f"continue with   {resume}"))
    else:
        rows.append(("train on", f"{resume} --total-steps {2 * config.total_steps}"))
    rows.append(("measure", f"holdfast eval {saved}"))
    rows.append(("compare", f"holdfast plot {shlex.quote(str(run.parent))}/* -o curves.png"))
    return rows


def draw(runs: list[Path], out: Path, aggregate: Literal["mean", "iqm"] = "mean") -> Path | None:
    """Plot runs to a file; None if there is nothing to plot yet, or if it cannot be plotted (which is printed)."""
    from holdfast.display.plot import plot_runs

    try:
        return plot_runs(runs, out, aggregate=aggregate)
    except ModuleNotFoundError as missing:
        show(missing)
    except OSError as error:
        out.unlink(missing_ok=True)
        show(f"{out} could not be drawn: {error}")
    except ValueError:  # no episode has ended yet
        pass
    return None
