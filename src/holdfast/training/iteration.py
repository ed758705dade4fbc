"""One iteration of training: a rollout, the replay check, an update, statistics, and the row of metrics it makes.

`RunProgress` says how far a run is: counters, the returns of recent episodes, the clock. A checkpoint holds all of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.algorithms.base import Progress
from holdfast.algorithms.reward_model import RewardModel
from holdfast.config import RunConfig
from holdfast.distributed import metrics as rank_metrics
from holdfast.distributed.metrics import Metric
from holdfast.rollout.env_failures import RebuildingEnv
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State, named_leaves, tree_map
from holdfast.training import isolation_check, nonfinite, replay_check
from holdfast.training.callbacks import Hooks
from holdfast.training.parts import Parts

RECENT_EPISODES = 100
"""`rollout/ep_rew_mean` is over these."""


def _recent() -> deque[float]:
    return deque(maxlen=RECENT_EPISODES)


@dataclass
class RunProgress:
    """Counters of a run, those of its parts before a resume included."""

    update: int = 0  # finished updates
    num_updates: int = 1  # of the whole run
    steps: int = 0
    best_return: float = -float("inf")
    last_eval: int = 0  # the update after which `EvalSchedule` last evaluated
    eval_steps: int = 0  # of each environment in all its evaluations
    recent_returns: deque[float] = field(default_factory=_recent)
    recent_lengths: deque[float] = field(default_factory=_recent)
    first_returns: list[float] | None = field(default_factory=list)
    """Of the run's first episodes, for `no_progress`; None: resumed from a checkpoint that does not hold them."""
    earlier_seconds: float = 0.0  # before `start_clock`
    _began: float | None = None

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self.earlier_seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    def start_clock(self) -> None:
        self._began = time.perf_counter()

    def stop_clock(self) -> None:
        self.earlier_seconds, self._began = self.seconds, None

    def add_episodes(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        self.recent_returns.extend(returns[-RECENT_EPISODES:])
        self.recent_lengths.extend(lengths[-RECENT_EPISODES:])

    def reached(self, target: float | None) -> bool:
        """Whether the mean return of a full window of recent episodes is at least `target`."""
        full = len(self.recent_returns) == RECENT_EPISODES
        return target is not None and full and mean(self.recent_returns) >= target


def mean(values: deque[float]) -> float:
    """NaN for none."""
    return float(np.mean(values)) if values else float("nan")


NAN = float("nan")
METRICS = (
    Metric("update"),
    Metric("steps", over_ranks="sum"),
    Metric("rollout/ep_rew_mean"),
    Metric("rollout/ep_len_mean"),
    Metric("rollout/episodes", over_ranks="sum"),
    Metric("rollout/intrinsic_mean"),
    Metric("rollout/first_in_trial", over_ranks="mean"),
    Metric("rollout/last_in_trial", over_ranks="mean"),
    Metric("memory/replay_gap", over_ranks="max"),
    Metric("memory/staleness", over_ranks="mean"),
    Metric("eval/mean_return"),
    Metric("eval/std_error"),
    Metric("eval/mean_length"),
    Metric("eval/episodes"),
    Metric("env/failures", over_ranks="sum"),
    Metric("time/env", over_ranks="max"),
    Metric("time/policy", over_ranks="max"),
    Metric("time/update", over_ranks="max"),
    Metric("time/fps"),
    Metric("time/elapsed"),
)
"""Besides those of the algorithm and of the memory."""


SATURATED = 0.99  # |h| above this: the unit hardly moves, and hardly passes a gradient
MEMORY_METRICS = (
    Metric("memory/rms", "state rms", over_ranks="rms"),
    Metric("memory/max", "state max", over_ranks="max"),
    Metric("memory/saturation", "saturated", over_ranks="mean", form="percent"),
    Metric("memory/nan", "NaN", over_ranks="sum", form="count"),
    Metric("memory/resets", "resets", over_ranks="sum", form="count"),
)


def memory_metrics(state: State, resets: Tensor) -> dict[str, float]:
    """Health of a state and the resets of a rollout, in one copy to the host."""
    return start_memory_metrics(state, resets, lambda numbers: numbers.tolist)()


@torch.no_grad()
def start_memory_metrics(state: State, resets: Tensor, read_later: Any) -> Callable[[], dict[str, float]]:
    """`memory_metrics` of a state that is not changed in place. Nothing waits for the GPU until the result is called."""
    parts = {name: leaf for name, leaf in named_leaves(state).items() if leaf.is_floating_point()}  # no counters
    count = resets.sum().float()
    if not parts:
        counted = read_later(count.unsqueeze(0))
        return lambda: {"memory/resets": counted()[0]}
    flat = torch.cat([leaf.float().flatten() for leaf in parts.values()])
    finite = torch.isfinite(flat)
    values = torch.where(finite, flat, 0.0)
    bounded = [leaf.float().flatten() for name, leaf in parts.items() if name.rpartition(".")[2] == "h"]
    saturation = (torch.cat(bounded).abs() > SATURATED).float().mean() if bounded else values.new_zeros(())
    numbers = read_later(
        torch.stack([values.square().mean().sqrt(), values.abs().max(), saturation, (~finite).sum().float(), count])
    )
    names = ("rms", "max", "saturation", "nan", "resets")
    return lambda: {f"memory/{name}": number for name, number in zip(names, numbers())}


class Iteration:
    """Runs iterations over the parts of a run. hooks: those of rollouts run before training on it. may_prefetch: asked in an
    update whether the next rollout may be started before the update is over."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        progress: RunProgress,
        hooks: Hooks,
        may_prefetch: Callable[[], bool],
        reward_model: RewardModel | None = None,
    ) -> None:
        self.config, self.parts, self.progress, self.hooks = config, parts, progress, hooks
        self.may_prefetch, self.reward_model = may_prefetch, reward_model
        self._intrinsic: Callable[[], list[float]] = list  # the mean of what it added to this rollout
        self.metrics = (*METRICS, *parts.algorithm.metrics, *MEMORY_METRICS)
        self._never_checked = True  # no rollout of this process has been replayed yet

    def run(self) -> tuple[dict[str, float], Segment]:
        """The row of metrics, the same on all ranks, and the segment of this one."""
        began = time.perf_counter()
        with self.parts.engines.exclusive():
            segment = self._roll_out()
        if self.hooks.callbacks:
            self.hooks.run("on_rollout_end", segment)
        with self.parts.engines.exclusive():
            return self._train_on(segment, began)

    def _train_on(self, segment: Segment, began: float) -> tuple[dict[str, Any], Segment]:
        parts, scheduled = self.parts, self._is_check_scheduled()
        update_began = time.perf_counter()
        gap = self._check_replay(segment, scheduled)
        finish_update = parts.algorithm.start_update(segment, self._progress())
        if self.reward_model is not None:
            with span("reward model"):
                self.reward_model.update(segment)
        with span("telemetry of memory"):
            memory = start_memory_metrics(parts.collector.memory.read(), segment.resets, parts.engines.read_later)
        # From here to `finish_update` a GPU trains.
        prefetches = parts.collector.prefetches and segment.all_valid and not scheduled and self.may_prefetch()
        prefetches = prefetches and self.reward_model is None
        if prefetches:
            self._move_statistics(segment)
            segment = parts.collector.prefetch(segment) or segment
        self._add_episodes(segment)
        measured = {**finish_update(), **memory(), **dict(zip(["rollout/intrinsic_mean"], self._intrinsic()))}
        over = time.perf_counter()
        # A GPU may still play the rollout when the update is queued.
        seconds = min(over - update_began, over - began - sum(segment.seconds.values()))
        if measured.get("train/skipped_steps") or measured.get("memory/nan"):
            parts.collector.cancel_prefetch()  # memory may have to be cleared
        stale = self._staleness(segment) if scheduled else {"memory/staleness": NAN}
        if not prefetches:
            self._move_statistics(segment)
        self.progress.update += 1
        row = self._row(segment, measured, gap, stale, seconds)
        if parts.ranks.joined:
            row = rank_metrics.combine(row, self.metrics, parts.ranks, self.config.num_envs, parts.device)
        self.progress.steps = row["steps"] = self.progress.steps + int(row["steps"])
        return row, segment

    def _progress(self) -> Progress:
        done, updates = self.progress.update, self.progress.num_updates
        return Progress(self.progress.steps, self.config.total_steps, done, updates, done / updates)

    def _roll_out(self) -> Segment:
        try:
            segment = self.parts.collector.rollout()
        except ValueError as error:
            replay_check.rollout_failed(self.parts.policy, error)
            raise
        self.parts.algorithm.prepare(segment)
        if self.reward_model is not None:
            with span("reward model"):
                self._intrinsic = self.parts.engines.read_later(self.reward_model.add_to(segment).view(1))
        return segment

    def _add_episodes(self, segment: Segment) -> None:
        ended = segment.episode_returns, segment.episode_lengths
        if self.parts.ranks.joined:
            ended = rank_metrics.episodes(self.parts.ranks, *ended, RECENT_EPISODES, self.parts.device)
        self.progress.add_episodes(*ended)

    def _is_check_scheduled(self) -> bool:
        update, every = self.progress.update, self.config.replay_check_every
        return update == 0 or (every > 0 and update % every == 0)

    def _check_replay(self, segment: Segment, scheduled: bool) -> float:
        """The replay gap. NaN where it was not scheduled, so that a resumed run writes what an unbroken one does."""
        # Non-finite input is not the policy's fault: that update will be skipped.
        if not (scheduled or self._never_checked) or not nonfinite.inputs_are_finite(segment):
            return NAN
        with span("replay check"):
            gap = replay_check.check(self.parts.algorithm, segment)
            if self._never_checked:
                isolation_check.check(self.parts.policy, segment, self.config.precision != "fp32")
        self._never_checked = False
        return gap if scheduled else NAN

    def _staleness(self, segment: Segment) -> dict[str, float]:
        """Where this segment ended, under the weights before and after the update."""
        with span("staleness of states"):
            segment.end_state, _ = self.parts.collector.memory.take(segment.num_envs)
            found = self.parts.algorithm.staleness(segment)
            return found if isinstance(found, dict) else {"memory/staleness": found}

    def _move_statistics(self, segment: Segment) -> None:
        """Statistics move only here, between an update and the next rollout."""
        parts, scale = self.parts, self.parts.algorithm.reward_scale
        if scale is not None:
            with span("reward statistics"):
                ends = segment.terminated | segment.truncated
                scale.update(segment.rewards, ends, segment.valid, parts.ranks)
        if parts.policy.normalizes:
            with span("observation statistics"):
                real = segment.obs if segment.all_valid else tree_map(lambda o: o[segment.valid], segment.obs)
                parts.policy.update_normalizer(real, parts.ranks)

    def _row(
        self, segment: Segment, measured: dict[str, float], gap: float, stale: dict[str, float], seconds: float
    ) -> dict[str, Any]:
        """This rank's metrics; "steps" are those of this update."""
        progress, parts = self.progress, self.parts
        row: dict[str, Any] = {
            "update": progress.update,
            "steps": segment.resets.numel() if segment.all_valid else int(segment.valid.sum()),
            "rollout/ep_rew_mean": mean(progress.recent_returns),
            "rollout/ep_len_mean": mean(progress.recent_lengths),
            "rollout/episodes": len(segment.episode_returns),
            **self._in_trials(),
            **measured,
            "memory/replay_gap": gap,
            **stale,
            "eval/mean_return": NAN,
            "eval/std_error": NAN,
            "eval/mean_length": NAN,
            "eval/episodes": NAN,
            "time/env": segment.seconds["env"],
            "time/policy": segment.seconds["policy"],
            "time/update": seconds,
        }
        if isinstance(parts.env, RebuildingEnv):
            row["env/failures"] = parts.env_failures.count
        return row

    def _in_trials(self) -> dict[str, float]:
        """The mean return of the first and the last episode of recent trials, if the environment plays trials."""
        if "trial_episodes" not in (self.parts.env.metadata or {}):
            return {}
        trials = self.parts.collector.recent_trials
        first, last = np.mean(trials, 0)[[0, -1]].tolist() if trials else (NAN, NAN)
        return {"rollout/first_in_trial": first, "rollout/last_in_trial": last}
