"""Exploration noise for Box actions that is correlated over time, one row per environment.

White noise pushes a heavy body back and forth and gets it nowhere. Here each action is mean + std * noise with

    noise[t] = correlation * noise[t-1] + sqrt(1 - correlation ** 2) * normal(0, 1)        # a fresh normal at a reset

At every step the noise is standard normal, so log-probabilities stay those of the Gaussian, in both legs. It belongs to
the rollout: checkpoints keep it, and evaluation and deployment draw white noise.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CorrelatedNoise:
    """`value` [B, n] is the noise of the latest step; `draw` gives the next."""

    def __init__(self, num_envs: int, actions: int, correlation: float, device: torch.device) -> None:
        if not 0.0 <= correlation < 1.0:
            raise ValueError(f"the correlation of noise must be at least 0 and below 1, got {correlation}")
        self.correlation = correlation
        self.value = torch.zeros(num_envs, actions, device=device)

    def draw(self, before: Tensor, resets: Tensor) -> Tensor:
        """The noise [B, n] after `before`; where `resets` is True an episode begins with fresh noise."""
        fresh = torch.randn_like(before)
        following = self.correlation * before + (1 - self.correlation**2) ** 0.5 * fresh
        return torch.where(resets.unsqueeze(1), fresh, following)

    def advance(self, resets: Tensor) -> Tensor:
        """Draw the next noise and keep it."""
        self.value = self.draw(self.value, resets)
        return self.value
