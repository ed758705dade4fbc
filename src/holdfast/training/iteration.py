"""One iteration of training: a rollout, the replay check, an update, statistics, and the row of metrics it makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from holdfast.algorithms.base import Progress
from holdfast.config import RunConfig
from holdfast.distributed import metrics as rank_metrics
from holdfast.distributed.metrics import Metric
from holdfast.engines.cuda_graph import exclusive_gpu
from holdfast.rollout.env_failures import RebuildingEnv
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import tree_map
from holdfast.training import nonfinite, replay_check, telemetry
from holdfast.training.parts import Parts
from holdfast.training.progress import RECENT_EPISODES, RunProgress, mean

NAN = float("nan")
METRICS = (
    Metric("update"),
    Metric("steps", over_ranks="sum"),
    Metric("rollout/ep_rew_mean"),
    Metric("rollout/ep_len_mean"),
    Metric("rollout/episodes", over_ranks="sum"),
    Metric("memory/replay_gap", over_ranks="max"),
    Metric("memory/staleness", over_ranks="mean"),
    Metric("eval/mean_return"),
    Metric("eval/mean_length"),
    Metric("env/failures", over_ranks="sum"),
    Metric("time/env", over_ranks="max"),
    Metric("time/policy", over_ranks="max"),
    Metric("time/update", over_ranks="max"),
    Metric("time/fps"),
    Metric("time/elapsed"),
)
"""Besides those of the algorithm and of `telemetry`."""


class Iteration:
    """Runs iterations over the parts of a run. on_rollout_end: called with each segment before training on it. may_prefetch:
    asked in each update whether the next rollout may be started before the update is over."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        progress: RunProgress,
        on_rollout_end: Callable[[Segment], None],
        may_prefetch: Callable[[], bool],
    ) -> None:
        self.config, self.parts, self.progress, self.on_rollout_end = config, parts, progress, on_rollout_end
        self.may_prefetch = may_prefetch
        self.metrics = (*METRICS, *parts.algorithm.metrics, *telemetry.METRICS)
        self._never_checked = True  # no rollout of this process has been replayed yet

    def run(self) -> tuple[dict[str, float], Segment]:
        """The row of metrics, the same on all ranks, and the segment of this one."""
        began = time.perf_counter()
        with exclusive_gpu(self.parts.device):
            segment = self._roll_out()
        self.on_rollout_end(segment)
        with exclusive_gpu(self.parts.device):
            return self._train_on(segment, began)

    def _train_on(self, segment: Segment, began: float) -> tuple[dict[str, Any], Segment]:
        parts, scheduled = self.parts, self._is_check_scheduled()
        update_began = time.perf_counter()
        gap = self._check_replay(segment, scheduled)
        finish_update = parts.algorithm.start_update(segment, self._progress())
        with span("telemetry of memory"):
            memory = telemetry.start_memory_metrics(parts.collector.memory.read(), segment.resets)
        # From here to `finish_update` a GPU trains.
        prefetches = segment.all_valid and not scheduled and self.may_prefetch()
        if prefetches:
            self._move_statistics(segment)
            segment = parts.collector.prefetch(segment) or segment
        self._add_episodes(segment)
        measured = {**finish_update(), **memory()}
        over = time.perf_counter()
        # A GPU may still play the rollout when the update is queued.
        seconds = min(over - update_began, over - began - sum(segment.seconds.values()))
        if measured.get("train/skipped_steps") or measured.get("memory/nan"):
            parts.collector.cancel_prefetch()  # memory may have to be cleared
        staleness = self._staleness(segment) if scheduled else NAN
        if not prefetches:
            self._move_statistics(segment)
        self.progress.update += 1
        row = self._row(segment, measured, gap, staleness, seconds)
        row = rank_metrics.combine(row, self.metrics, parts.ranks, self.config.num_envs, parts.device)
        self.progress.steps = row["steps"] = self.progress.steps + int(row["steps"])
        return row, segment

    def _progress(self) -> Progress:
        progress, config = self.progress, self.config
        return Progress(progress.steps, config.total_steps, progress.update, config.num_updates)

    def _roll_out(self) -> Segment:
        try:
            segment = self.parts.collector.rollout()
        except ValueError as error:
            replay_check.rollout_failed(self.parts.policy, error)
            raise
        self.parts.algorithm.prepare(segment)
        return segment

    def _add_episodes(self, segment: Segment) -> None:
        ended = segment.episode_returns, segment.episode_lengths
        all_ended = rank_metrics.episodes(self.parts.ranks, *ended, RECENT_EPISODES, self.parts.device)
        self.progress.add_episodes(*all_ended)

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
        self._never_checked = False
        return gap if scheduled else NAN

    def _staleness(self, segment: Segment) -> float:
        """Where this segment ended, under the weights before and after the update."""
        with span("staleness of states"):
            stored, _ = self.parts.collector.memory.take(segment.num_envs)
            return self.parts.algorithm.staleness(segment, stored)

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
        self, segment: Segment, measured: dict[str, float], gap: float, staleness: float, seconds: float
    ) -> dict[str, Any]:
        """This rank's metrics; "steps" are those of this update."""
        progress, parts = self.progress, self.parts
        row: dict[str, Any] = {
            "update": progress.update,
            "steps": segment.resets.numel() if segment.all_valid else int(segment.valid.sum()),
            "rollout/ep_rew_mean": mean(progress.recent_returns),
            "rollout/ep_len_mean": mean(progress.recent_lengths),
            "rollout/episodes": len(segment.episode_returns),
            **measured,
            "memory/replay_gap": gap,
            "memory/staleness": staleness,
            "eval/mean_return": NAN,
            "eval/mean_length": NAN,
            "time/env": segment.seconds["env"],
            "time/policy": segment.seconds["policy"],
            "time/update": seconds,
        }
        if isinstance(parts.env, RebuildingEnv):
            row["env/failures"] = parts.env_failures.count
        return row
