"""Gaussian noise on observations of two numbers, as in POPGym's noisy tasks. A mixin: it comes before the task's class."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.envs.base import TorchVectorEnv


class NoisyPosition(TorchVectorEnv):
    """Adds noise for two observations to a task's draws: that of an episode's first step, and of the next one."""

    def __init__(
        self,
        num_envs: int,
        noise_sigma: float = 0.1,
        max_episode_length: int = 200,
        device: torch.device | str = "cpu",
    ) -> None:
        if noise_sigma < 0:
            raise ValueError(f"noise_sigma is {noise_sigma}; expected at least 0")
        super().__init__(num_envs, max_episode_length, device)  # type: ignore[call-arg, arg-type]
        self.settings = {**self.settings, "noise_sigma": noise_sigma}

    def draw(self) -> Tensor:
        """[B, n + 4]: the task's own numbers, noise for an episode's first observation, noise for the next one."""
        noise = torch.empty(self.num_envs, 4, device=self.device)
        noise = noise.normal_(0, self.settings["noise_sigma"], generator=self.generator)
        return torch.cat((super().draw(), noise), 1)  # type: ignore[safe-super]
