"""Exploration noise of rollouts, one row per environment: numbers from which a distribution makes its action.

It belongs to the rollout: checkpoints keep it, and evaluation and deployment draw without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Noise:
    """`value` [B, n] is the noise of the latest step; `draw` gives the next. An algorithm makes one for its rollouts."""

    value: Tensor

    def draw(self, before: Tensor, resets: Tensor) -> Tensor:
        """The noise [B, n] after `before`; where `resets` is True an episode begins. Pure: a captured rollout calls it."""
        raise NotImplementedError

    def advance(self, resets: Tensor, rows: Tensor | None = None) -> Tensor:
        """Draw the next noise and keep it; of some environments only if `rows` names them."""
        if rows is None:
            self.value = self.draw(self.value, resets)
            return self.value
        drawn = self.draw(self.value.index_select(0, rows), resets)
        self.value = self.value.index_copy(0, rows, drawn)
        return drawn


class EpsilonNoise(Noise):
    """Random actions now and then, for a `Greedy` policy: [B, 1 + n], the first number negative with probability `epsilon` [B]."""

    def __init__(self, num_envs: int, actions: int, device: torch.device) -> None:
        self.epsilon = torch.ones(num_envs, device=device)  # filled in place: a captured rollout reads it
        self.value = torch.zeros(num_envs, 1 + actions, device=device)

    def draw(self, before: Tensor, resets: Tensor) -> Tensor:
        return self._drawn(before, self.epsilon)

    def advance(self, resets: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            return super().advance(resets)
        drawn = self._drawn(self.value.index_select(0, rows), self.epsilon.index_select(0, rows))
        self.value = self.value.index_copy(0, rows, drawn)
        return drawn

    def _drawn(self, like: Tensor, epsilon: Tensor) -> Tensor:
        drawn = torch.rand_like(like)
        return torch.cat([drawn[:, :1] - epsilon.unsqueeze(1), drawn[:, 1:]], 1)


class CorrelatedNoise(Noise):
    """Noise for Box actions that is correlated over time.

    White noise pushes a heavy body back and forth and gets it nowhere. Here each action is mean + std * noise with

        noise[t] = correlation * noise[t-1] + sqrt(1 - correlation ** 2) * normal(0, 1)        # a fresh normal at a reset

    At every step the noise is standard normal, so log-probabilities stay those of the Gaussian, in both legs.
    """

    def __init__(self, num_envs: int, actions: int, correlation: float, device: torch.device) -> None:
        if not 0.0 <= correlation < 1.0:
            raise ValueError(f"the correlation of noise must be at least 0 and below 1, got {correlation}")
        self.correlation = correlation
        self.value = torch.zeros(num_envs, actions, device=device)

    @classmethod
    def for_actions(cls, space: Any, num_envs: int, correlation: float, device: torch.device) -> CorrelatedNoise | None:
        """For the actions of a Box, or of all Boxes of a Dict or Tuple side by side; None for other spaces, and for white noise,
        which distributions draw themselves."""
        from holdfast.policies.action_parts import boxes_of, num_outputs  # imports gymnasium

        boxes = boxes_of(space)
        if correlation == 0.0 or not boxes:
            return None
        return cls(num_envs, sum(map(num_outputs, boxes)), correlation, device)

    def draw(self, before: Tensor, resets: Tensor) -> Tensor:
        fresh = torch.randn_like(before)
        following = self.correlation * before + (1 - self.correlation**2) ** 0.5 * fresh
        return torch.where(resets.unsqueeze(1), fresh, following)
