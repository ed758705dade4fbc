"""PPO's update on a GPU without waiting for it: the host queues all of it, does other work, and reads all metrics at once.

`algorithms/ppo.py` says what is computed. Where the host must look at a number in between, `PPO` itself runs the update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from holdfast.algorithms.ppo import PPO, MinibatchMetrics, in_loss_units, normalize_advantage
from holdfast.engines.cuda_graph import read_later
from holdfast.rollout.segment import Segment
from holdfast.spans import span

Metrics = dict[str, float]


def start_update(ppo: PPO, segment: Segment, progress: float, all_valid: bool) -> Callable[[], Metrics]:
    """Start an update and return the function that waits for its metrics. Engines that wait do it here."""
    if isinstance(ppo, QueuedPPO):
        return ppo.start(segment, progress, all_valid)
    metrics = ppo.update(segment, progress, all_valid)
    return lambda: metrics


class QueuedPPO(PPO):
    """As `PPO`; `start` returns as soon as the whole update is queued."""

    def update(self, segment: Segment, progress: float, all_valid: bool = False) -> Metrics:
        return self.start(segment, progress, all_valid)()

    def start(self, segment: Segment, progress: float, all_valid: bool = False) -> Callable[[], Metrics]:
        config = self.config
        refreshes = config.refresh_states and config.epochs > 1 and config.sequences_per_env > 1
        if not all_valid or self.ranks.joined or config.target_kl is not None or refreshes:
            metrics = super().update(segment, progress, all_valid)
            return lambda: metrics
        with span("update"):
            return self._queue(segment, progress)

    def _queue(self, segment: Segment, progress: float) -> Callable[[], Metrics]:
        config, scale = self.config, self.policy.value_scale
        segment = without_episodes(segment)
        rate = self._set_learning_rate(progress)
        variances = self._variances(segment)
        if scale is not None:
            with span("value statistics"):
                self._move_value_scale(segment, all_valid=True)
        if config.normalize_advantage:
            segment = normalize_advantage(segment)
        batch = in_loss_units(segment, scale).as_sequences(config.bptt)
        engine = self.engine_for(batch, self.loss_settings(progress), True)
        sums, count = torch.zeros(len(MinibatchMetrics._fields), device=segment.resets.device), 0
        for _ in range(config.epochs):
            for columns in self.minibatches(batch.num_envs, segment.resets.device):
                sums += engine.step(columns, 1.0)
                count += 1
        numbers = read_later(torch.cat([sums.double(), variances]))

        def metrics() -> Metrics:
            with span("waiting for the update"):
                *reported, variance, unexplained = numbers()
            means, skipped = self._means(torch.tensor(reported), count)
            return {
                **means,
                "train/explained_variance": 1 - unexplained / variance if variance > 0 else float("nan"),
                "train/skipped_steps": skipped,
                "train/learning_rate": rate,
                "train/epochs": float(config.epochs),
            }

        return metrics

    def _variances(self, segment: Segment) -> Tensor:
        """Of returns, and of returns - values."""
        returns, value = segment.returns.flatten(), segment.value.flatten()
        return self.ranks.moments(torch.stack([returns, returns - value], 1))[1]

    def minibatches(self, columns: int, device: torch.device) -> list[Tensor | None]:
        """As PPO's; the permutation is copied to the GPU without waiting for what runs there."""
        if self.config.minibatches == 1 or device.type != "cuda":
            return super().minibatches(columns, device)
        order = torch.randperm(columns, generator=self.generator, pin_memory=True)
        return list(order.to(device, non_blocking=True).tensor_split(self.config.minibatches))


def without_episodes(segment: Segment) -> Segment:
    """The same tensors. The episodes of a captured rollout are read when somebody asks for them, which would wait for it."""
    names = [f.name for f in fields(segment) if f.name not in ("episode_returns", "episode_lengths")]
    return Segment(**{name: getattr(segment, name) for name in names})
