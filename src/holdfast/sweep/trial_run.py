"""One trial: train with these settings, report the learning curve, stop early if it is hopeless, give a score."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holdfast.config import RunConfig, imports, names_about, settings_of
from holdfast.distributed.processes import Terminated
from holdfast.runs import checkpoint, saved_policy
from holdfast.runs.log import read_progress
from holdfast.sweep.study import REPORTS, Study, key_of
from holdfast.training.callbacks import Callback
from holdfast.training.trainer import Trainer

Objective = Literal["area", "final"]
METRIC = "rollout/ep_rew_mean"


class OutOfTimeError(Exception):
    """The sweep's time is over, or its parent process is gone; the trial is saved and can go on later."""


def run_trial(
    study: Study,
    trial: Any,
    base: RunConfig,
    folder: Path,
    objective: Objective,
    pruning: bool,
    must_stop: Callable[[], bool],
) -> None:
    """Train one trial and tell the study. must_stop: asked after each update; if True, the trial is put back.

    Every way to end but a kill leaves the trial finished, failed with a reason, or queued again.
    """
    try:
        config = trial_config(study, trial, base, folder, objective)
    except ValueError as error:  # settings that do not go together
        study.fail(trial, _one_line(error))
        return
    watch = _Watch(trial, config.total_steps, pruning, must_stop)
    try:
        with study.beating(trial), _default_sigterm():
            trainer = _trainer(config, watch)
            trainer.print_resume_hint = False  # resumed alone, the trial would be missing from the study
            result = trainer.run()
        if watch.stopped:
            raise OutOfTimeError
        if result.stopped_by == "interrupt":
            raise KeyboardInterrupt
    except (KeyboardInterrupt, Terminated, OutOfTimeError):
        study.put_back(trial)
        raise
    except Exception as error:  # an environment, a loss that is not finite, a disk: all belong to these settings
        study.fail(trial, _one_line(error))
        return
    if watch.pruned:
        study.prune(trial)
        return
    score = result.mean_return if objective == "final" else area(config.folder, config.total_steps)
    if np.isfinite(score):
        study.complete(trial, float(score))
    else:
        study.fail(trial, "no episode ended, so there is no return; train for more steps (--total-steps)")


def trial_config(study: Study, trial: Any, base: RunConfig, folder: Path, objective: Objective) -> RunConfig:
    index, seed = key_of(trial)
    name = f"{index:04d}" if seed is None else f"{index:04d}-seed{seed}"
    return replace(
        base,
        **study.settings(trial),
        seed=base.seed if seed is None else seed,
        run_dir=str(folder / "trials" / name),
        name=None,
        quiet=True,
        track=False,
        keep_checkpoints=1,
        final_eval_episodes=base.final_eval_episodes if objective == "final" else 1,
    )


def _trainer(config: RunConfig, watch: _Watch) -> Trainer:
    """A new run, or the one that an earlier attempt has left, in the first folder that does not hold another run.

    A folder may hold a trial of an earlier study of the same name, with other settings, or a damaged checkpoint.
    """
    first = config.run_dir
    for number in count():
        config.run_dir = f"{first}-again{number if number > 1 else ''}" if number else first
        if checkpoint.rolling(config.folder):
            with suppress(checkpoint.CheckpointError):
                if _is_of(config, saved_policy.settings(*saved_policy.read(config.folder), imports.named_in(config))):
                    return Trainer.resume(config.folder, callbacks=[watch], allow_imports=imports.named_in(config))
        elif not read_progress(config.folder) or _is_recorded(config):
            break
    return Trainer(config, callbacks=[watch])


def _is_recorded(config: RunConfig) -> bool:
    """Whether a run without a checkpoint is one of these settings."""
    try:
        return _is_of(config, RunConfig.load(config.folder / "config.json", imports.named_in(config)))
    except (OSError, ValueError):
        return False


def _is_of(config: RunConfig, saved: RunConfig) -> bool:
    """Whether a saved run has the settings of a trial. What the trial leaves to the run is chosen there."""
    asked, found = config.to_dict(), saved.to_dict()
    left_out = {name for name, one in settings_of(type(config)).items() if one.chosen and asked[name] is None}
    left_out |= names_about(type(config), "upkeep", "place") | (set() if config.inputs else {"inputs"})
    return asked.keys() == found.keys() and all(asked[name] == found[name] for name in asked.keys() - left_out)


def area(run: Path, total_steps: int) -> float:
    """Mean of the learning curve over all steps. The first value holds before it, the last after it: a run that stops
    early, because it has reached its target, is as good afterwards as it was then."""
    pairs = [
        (float(row["steps"]), float(row[METRIC]))
        for row in read_progress(run)
        if row.get(METRIC) not in (None, "", "nan")
    ]
    if not pairs:
        return float("nan")
    steps, values = np.array(pairs).T
    steps = np.concatenate([[0.0], np.minimum(steps, total_steps), [float(total_steps)]])
    values = np.concatenate([values[:1], values, values[-1:]])
    return float(np.sum(np.diff(steps) * (values[1:] + values[:-1]) / 2) / total_steps)


class _Watch(Callback):
    """Reports the curve at REPORTS points."""

    only_watches = True

    def __init__(self, trial: Any, total_steps: int, pruning: bool, must_stop: Callable[[], bool]) -> None:
        self._trial, self._total, self._pruning, self._must_stop = trial, total_steps, pruning, must_stop
        self._reported = -1
        self.pruned = self.stopped = False

    def on_update_end(self, trainer: Trainer, row: dict[str, float]) -> bool | None:
        at, value = REPORTS * trainer.steps // self._total, row[METRIC]
        if self._must_stop():
            self.stopped = trainer.update < trainer.config.num_updates  # else it is done anyway
            return not self.stopped
        if at > self._reported and np.isfinite(value):
            self._reported = at
            self._trial.report(float(value), at)
            self.pruned = self._pruning and at < REPORTS and bool(self._trial.should_prune())
        return not self.pruned


@contextmanager
def _default_sigterm() -> Iterator[None]:
    """The trainer handles SIGTERM itself, if nobody else does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]


def deadline_after(seconds: float | None) -> float:
    """On the clock of `time.monotonic`."""
    return float("inf") if seconds is None else time.monotonic() + seconds
