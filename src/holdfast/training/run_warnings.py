"""Warnings for when "the RNN does not learn", from the metrics of an update. Nothing here changes the run."""

from __future__ import annotations

import math
from typing import Any

from gymnasium import spaces

from holdfast.algorithms.base import Algorithm
from holdfast.config import RunConfig
from holdfast.rollout.segment import Segment
from holdfast.training.iteration import SATURATED
from holdfast.training.no_progress import ProgressCheck


class Warnings:
    """Gives each warning once. first_returns: as in `ProgressCheck`."""

    def __init__(
        self, algorithm: Algorithm, action_space: spaces.Space[Any] | None, first_returns: list[float] | None
    ) -> None:
        self.config: RunConfig = algorithm.config
        self._entropy_setting = "target_entropy" if hasattr(self.config, "target_entropy") else "entropy_coef"
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
                    f"the first fifth of the run. Raise {self._entropy_setting} or lower learning_rate.",
                )
            )
        length = getattr(self.config, "train_length", self.config.sequence_length)
        episode = row.get("rollout/ep_len_mean", 0.0)
        if self.config.core != "none" and episode > 2 * length:
            found.append(
                (
                    "bptt",
                    f"episodes last {episode:.0f} steps on average, but gradients reach only {length} steps back. "
                    f"If the task needs longer memory, raise {self._raises()}.",
                )
            )
        stuck = self._progress.after_update(row, segment.episode_returns)
        if stuck is not None:
            found.append(("progress", stuck))
        new = [text for name, text in found if name not in self._said]
        self._said |= {name for name, _ in found}
        return new

    def _raises(self) -> str:
        """The settings on which the reach of gradients depends."""
        if hasattr(self.config, "train_length"):
            return "train_length"
        return "num_steps or bptt" if self.config.sequence_length < self.config.num_steps else "num_steps"


def _max_entropy(space: spaces.Space[Any] | None) -> float | None:
    if isinstance(space, spaces.Discrete):
        return math.log(max(2, int(space.n)))
    if isinstance(space, spaces.MultiDiscrete):
        return float(sum(math.log(max(2, int(n))) for n in space.nvec.flatten()))
    if isinstance(space, spaces.MultiBinary):
        return math.log(2) * math.prod(space.shape)
    return None
