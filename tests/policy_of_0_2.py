"""The policy of the run `run_0_2/own`. Its weights lie in that run's checkpoints, so it never changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import holdfast as hf


class OwnPolicy(hf.RecurrentPolicy):
    """One-hot observations, a GRU, two linear heads."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(core=hf.GRU(int(observation_space.n), 8))
        self.choices = int(observation_space.n)
        self.actor, self.critic = nn.Linear(8, int(action_space.n)), nn.Linear(8, 1)

    def encode(self, obs: Tensor) -> Tensor:
        return nn.functional.one_hot(obs.long(), self.choices).float()

    def decode(self, features: Tensor) -> tuple[Any, Tensor]:
        return torch.distributions.Categorical(logits=self.actor(features)), self.critic(features)
