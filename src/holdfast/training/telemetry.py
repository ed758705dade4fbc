"""Metrics of a run's memory (`memory/*`), and warnings for when "the RNN does not learn".

One device-to-host copy per update. Nothing here changes the run. The whole row of metrics is built in `iteration.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from holdfast.algorithms.base import Algorithm
from holdfast.config import RunConfig
from holdfast.distributed.metrics import Metric
from holdfast.engines.cuda_graph import read_later
from holdfast.rollout.segment import Segment
from holdfast.state import State, named_leaves
from holdfast.training.no_progress import ProgressCheck

SATURATED = 0.99  # |h| above this: the unit hardly moves, and hardly passes a gradient
METRICS = (
    Metric("memory/rms", "state rms", over_ranks="rms"),
    Metric("memory/max", "state max", over_ranks="max"),
    Metric("memory/saturation", "saturated", over_ranks="mean", form="percent"),
    Metric("memory/nan", "NaN", over_ranks="sum", form="count"),
    Metric("memory/resets", "resets", over_ranks="sum", form="count"),
)


def memory_metrics(state: State, resets: Tensor) -> dict[str, float]:
    """Health of a state and the resets of a rollout, in one copy to the host."""
    return start_memory_metrics(state, resets)()


@torch.no_grad()
def start_memory_metrics(state: State, resets: Tensor) -> Callable[[], dict[str, float]]:
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


class Warnings:
    """Gives each warning once. first_returns: as in `ProgressCheck`."""

    def __init__(
        self, algorithm: Algorithm, action_space: spaces.Space[Any] | None, first_returns: list[float] | None
    ) -> None:
        self.config: RunConfig = algorithm.config
        self.max_entropy = _max_entropy(action_space)
        self._said: set[str] = set()
        self._progress = ProgressCheck(self.config, algorithm.advice, first_returns)

    def after_update(self, row: dict[str, float], segment: Segment) -> list[str]:
        found = []
        saturation = row.get("memory/saturation", 0.0)
        if saturation > 0.5:
            found.append(
                (
                    "saturation",
                    f"{saturation:.0%} of the memory's units are saturated (|h| > {SATURATED}): gradients barely pass. "
                    "Try a lower learning rate, normalize_obs, or a smaller max_grad_norm.",
                )
            )
        if row.get("memory/nan", 0.0) > 0:
            found.append(("nan", "the memory holds NaN or Inf. hf.debug(True) finds the environment and step."))
        entropy = row.get("train/entropy", math.nan)
        young = row.get("steps", 0) < 0.2 * self.config.total_steps
        if young and self.max_entropy and entropy < 0.02 * self.max_entropy:
            found.append(
                (
                    "entropy",
                    f"the policy has almost stopped exploring (entropy {entropy:.3f} of {self.max_entropy:.2f}) in "
                    "the first fifth of the run. Raise entropy_coef or lower learning_rate.",
                )
            )
        length = self.config.sequence_length
        episode = row.get("rollout/ep_len_mean", 0.0)
        if self.config.core != "none" and episode > 2 * length:
            found.append(
                (
                    "bptt",
                    f"episodes last {episode:.0f} steps on average, but gradients reach only {length} steps back. "
                    "If the task needs longer memory, raise num_steps"
                    + (" or bptt." if length < self.config.num_steps else "."),
                )
            )
        stuck = self._progress.after_update(row, segment.episode_returns)
        if stuck is not None:
            found.append(("progress", stuck))
        new = [text for name, text in found if name not in self._said]
        self._said |= {name for name, _ in found}
        return new


def _max_entropy(space: spaces.Space[Any] | None) -> float | None:
    if isinstance(space, spaces.Discrete):
        return math.log(max(2, int(space.n)))
    if isinstance(space, spaces.MultiDiscrete):
        return float(sum(math.log(max(2, int(n))) for n in space.nvec.flatten()))
    if isinstance(space, spaces.MultiBinary):
        return math.log(2) * math.prod(space.shape)
    return None
