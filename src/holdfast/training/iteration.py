"""One iteration of training: a rollout, the replay check, PPO's update, statistics, and the row of metrics it makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from holdfast.config import TrainConfig
from holdfast.distributed import metrics as rank_metrics
from holdfast.engines.cuda_graph import gpu_turn
from holdfast.engines.queued_update import start_update
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.precision import autocast, autocast_dtype
from holdfast.rollout.env_failures import RebuildingEnv
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import tree_map
from holdfast.training import nonfinite, replay_check, telemetry
from holdfast.training.parts import Parts
from holdfast.training.progress import RECENT_EPISODES, RunProgress, mean

NAN = float("nan")


class Iteration:
    """Runs iterations over the parts of a run. on_rollout_end: called with each segment before training on it. may_go_ahead:
    asked in each update whether the next rollout may be started before the update is over."""

    def __init__(
        self,
        config: TrainConfig,
        parts: Parts,
        progress: RunProgress,
        on_rollout_end: Callable[[Segment], None],
        may_go_ahead: Callable[[], bool],
    ) -> None:
        self.config, self.parts, self.progress, self.on_rollout_end = config, parts, progress, on_rollout_end
        self.may_go_ahead = may_go_ahead
        self._never_checked = True  # no rollout of this process has been replayed yet
        self._autocast = autocast_dtype(config.precision)

    def run(self) -> tuple[dict[str, float], Segment]:
        """The row of metrics, the same on all ranks, and the segment of this one."""
        with gpu_turn(self.parts.device):
            segment = self._roll_out()
        self.on_rollout_end(segment)
        with gpu_turn(self.parts.device):
            return self._train_on(segment)

    def _train_on(self, segment: Segment) -> tuple[dict[str, Any], Segment]:
        all_valid = not self.parts.collector.adapter.has_dummy_steps
        scheduled = self._is_check_scheduled()
        began = time.perf_counter()
        gap = self._check_replay(segment, scheduled)
        fraction = self.progress.update / self.config.num_updates
        finish_update = start_update(self.parts.ppo, segment, fraction, all_valid)
        with span("telemetry of memory"):
            memory = telemetry.start_memory_metrics(self.parts.collector.memory.read(), segment.resets)
        # From here to `finish_update` a GPU trains.
        goes_ahead = all_valid and not scheduled and self.may_go_ahead()
        if goes_ahead:
            self._move_statistics(segment, all_valid)
            segment = self.parts.collector.go_ahead(segment) or segment
        self._add_episodes(segment)
        losses = {**finish_update(), **memory()}
        seconds = time.perf_counter() - max(began, getattr(segment, "over_at", began))
        if losses["train/skipped_steps"] or losses.get("memory/nan"):
            self.parts.collector.take_back()  # memory may have to be cleared
        staleness = self._staleness(segment) if scheduled else NAN
        if not goes_ahead:
            self._move_statistics(segment, all_valid)
        self.progress.update += 1
        row = self._row(segment, all_valid, losses, gap, staleness, seconds)
        row = rank_metrics.combine(row, self.parts.ranks, self.config.num_envs, self.parts.device)
        self.progress.steps = row["steps"] = self.progress.steps + int(row["steps"])
        return row, segment

    def _roll_out(self) -> Segment:
        try:
            return self.parts.collector.rollout()
        except ValueError as error:
            replay_check.rollout_failed(self.parts.policy, error)
            raise

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
            gap = replay_check.check(self.parts.policy, segment, self._autocast, self.config.bptt)
        self._never_checked = False
        return gap if scheduled else NAN

    @torch.no_grad()
    def _staleness(self, segment: Segment) -> float:
        """Stored against recomputed: where this segment ended, under the weights before and after the update."""
        with span("staleness of states"), autocast(self.parts.device, self._autocast):
            now = self.parts.policy.unroll(
                segment.obs, segment.start_state, segment.resets, action_mask=segment.action_mask
            ).state
            return telemetry.staleness(self.parts.collector.memory.take(segment.num_envs)[0], now)

    def _move_statistics(self, segment: Segment, all_valid: bool) -> None:
        """Statistics move only here, between an update and the next rollout."""
        parts = self.parts
        if parts.reward_scale is not None:
            with span("reward statistics"):
                ends = segment.terminated | segment.truncated
                parts.reward_scale.update(segment.rewards, ends, segment.valid, parts.ranks)
                parts.collector.reward_scale = parts.reward_scale.value
        if isinstance(parts.policy, ActorCritic) and parts.policy.normalizes:
            with span("observation statistics"):
                real = segment.obs if all_valid else tree_map(lambda o: o[segment.valid], segment.obs)
                parts.policy.update_normalizer(real, parts.ranks)

    def _row(
        self,
        segment: Segment,
        all_valid: bool,
        measured: dict[str, float],
        gap: float,
        staleness: float,
        seconds: float,
    ) -> dict[str, Any]:
        """This rank's metrics; "steps" are those of this update."""
        progress, parts = self.progress, self.parts
        row: dict[str, Any] = {
            "update": progress.update,
            "steps": segment.resets.numel() if all_valid else int(segment.valid.sum()),
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
