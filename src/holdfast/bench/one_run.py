"""One run of a suite: train, or go on from its checkpoint, evaluate, and give its line of results.

The statistic of POPGym's paper is the maximum over training of the mean return of an update. Here that mean is over the
episodes that ended in the update, or over the last 100 where fewer did, as RLlib reports it. Each update's mean is a column
of the run's progress.csv, so a resumed run knows those before it.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.bench.jobs import Job
from holdfast.bench.results import Row
from holdfast.config import RunConfig, imports, names_about
from holdfast.rollout.segment import Segment
from holdfast.runs import checkpoint
from holdfast.runs.log import read_progress
from holdfast.runs.metadata import cpu_name, git_state, package_versions
from holdfast.training.callbacks import Callback
from holdfast.training.iteration import RECENT_EPISODES
from holdfast.training.trainer import Trainer, TrainResult

MEAN_RETURN, EPISODES = "bench/mean_return", "bench/episodes"
CHECKPOINT_SECONDS = 30.0
"""A run that is killed loses at most this much training."""
MAX_POINTS = 100
"""Points of a curve in the results, at most."""
COMMIT_VARIABLE = "HOLDFAST_COMMIT"
"""Names the commit on a machine that got a copy of the files, where the current folder is in no repository or in an older one."""


def train(
    job: Job,
    folder: Path,
    look: Callable[[int], bool] = lambda steps: True,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Row | None:
    """The results of a job, or None if it was stopped before its end. folder: the run's own, removed by nobody here.
    Raises an error if there is no return to report.

    look: called after every update with the number of steps so far; False saves and stops the run.
    """
    began = time.perf_counter()
    watch = _Watch(look, checkpoint_seconds)
    trainer = _make_trainer(job, folder, watch)
    earlier, built = trainer.seconds, time.perf_counter()
    result = trainer.run()
    if result.stopped_by in ("interrupt", "callback"):
        return None
    _require_return(result)
    ended = time.perf_counter()
    greedy = trainer.evaluate(job.config["final_eval_episodes"], deterministic=True) if job.deterministic else None
    curve = _curve(folder)
    best, best_at = _best(curve)
    trained = result.seconds - earlier  # in this process
    left_out = names_about(type(trainer.config), "upkeep", "place") - {"device"}
    config = {name: value for name, value in trainer.config.to_dict().items() if name not in left_out}
    return {
        "id": job.id,
        "suite": job.suite,
        "task": job.task,
        "core": job.core,
        "seed": job.seed,
        "steps": job.steps,
        "setting": job.setting,
        "best": best,
        "best_at": best_at,
        "final": result.mean_return,
        "final_std_error": _or_none(result.std_error),
        **({} if greedy is None else {"final_deterministic": _or_none(greedy.mean_return)}),
        "trained_steps": result.steps,
        "steps_per_second": round(result.steps / result.seconds, 1),
        "seconds": round(result.seconds, 2),
        "wall_seconds": round(earlier + time.perf_counter() - began, 2),
        "phases": {
            "build": round(built - began, 2),
            "first update": round(watch.first_update, 2),
            "other updates": round(max(0.0, trained - watch.first_update), 2),
            "save, evaluate": round(ended - built - trained, 2),
        },
        "engine": trainer.engines,
        "device": _device_name(trainer),
        "commit": os.environ.get(COMMIT_VARIABLE) or (git_state() or {}).get("commit"),
        "packages": package_versions(("holdfast", "torch")),
        "config": config,
        "curve": [[steps, float(f"{value:.5g}")] for steps, value, _ in _thinned(curve)],
    }


def _require_return(result: TrainResult) -> None:
    if result.episodes == 0:
        raise RuntimeError(
            "no episode of the evaluation ended; give the environment a time limit (its max_episode_steps)"
        )
    if not math.isfinite(result.mean_return):
        raise RuntimeError(
            f"the mean return of the evaluation is {result.mean_return}; the rewards must be finite numbers"
        )


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Watch(Callback):
    """Adds the statistic to each row, saves now and then, and stops the run when asked to."""

    only_watches = True

    def __init__(self, look: Callable[[int], bool], checkpoint_seconds: float) -> None:
        self.look, self.checkpoint_seconds = look, checkpoint_seconds
        self.first_update = 0.0
        self._returns: Sequence[float] = []
        self._saved = self._began = time.perf_counter()

    def on_run_start(self, trainer: Trainer) -> None:
        self._saved = self._began = time.perf_counter()

    def on_rollout_end(self, trainer: Trainer, segment: Segment) -> None:
        self._returns = segment.episode_returns

    def on_update_end(self, trainer: Trainer, row: dict[str, float]) -> bool:
        now = time.perf_counter()
        self.first_update = self.first_update or now - self._began
        enough = len(self._returns) >= RECENT_EPISODES
        row[MEAN_RETURN] = statistics.fmean(self._returns) if enough else row["rollout/ep_rew_mean"]
        row[EPISODES] = len(self._returns) if enough else len(trainer.progress.recent_returns)
        if now - self._saved > self.checkpoint_seconds:
            trainer.request_checkpoint()
            self._saved = now
        return self.look(trainer.steps)


def _make_trainer(job: Job, folder: Path, watch: _Watch) -> Trainer:
    config = RunConfig.from_dict(
        {**job.config, "run_dir": str(folder), "checkpoint_every": 0, "keep_checkpoints": 1, "eval_every": 0}
    )
    if checkpoint.rolling(folder):
        try:
            allowed = imports.named_in(config)
            return Trainer.resume(folder, callbacks=[watch], allow_imports=allowed, device=config.device, quiet=True)
        except checkpoint.CheckpointError:
            shutil.rmtree(folder)  # damaged: from the beginning
    return Trainer(config, callbacks=[watch])


def _curve(folder: Path) -> list[tuple[int, float, int]]:
    """Steps, mean return and number of episodes behind it, of every update in which there was one."""
    rows = [row for row in read_progress(folder) if row.get(MEAN_RETURN)]
    points = [(int(float(row["steps"])), float(row[MEAN_RETURN]), int(float(row[EPISODES]))) for row in rows]
    return [point for point in points if math.isfinite(point[1])]


def _best(curve: list[tuple[int, float, int]]) -> tuple[float | None, int | None]:
    """The highest mean and its steps. A mean of fewer than 100 episodes counts only in a run that has no other."""
    counted = [point for point in curve if point[2] >= RECENT_EPISODES] or curve
    if not counted:
        return None, None
    steps, value, _ = max(counted, key=lambda point: point[1])
    return value, steps


def _thinned(curve: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    """Every n-th point and the last one."""
    every = -(-len(curve) // (MAX_POINTS - 1)) or 1
    return curve[::every] + (curve[-1:] if curve and (len(curve) - 1) % every else [])


def _device_name(trainer: Trainer) -> str:
    if trainer.device.type == "cuda":
        import torch

        return str(torch.cuda.get_device_name(trainer.device))
    return cpu_name()
