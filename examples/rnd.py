"""Random network distillation: a reward for what is new, where the environment's own reward is too rare to find.

    python examples/rnd.py

A lock has 14 dials with one right choice of two each; a wrong one begins again, and only the open lock gives a reward. The bonus is
how badly a network predicts what another one, random and fixed, makes of an observation. Burda et al. 2018, "Exploration by random
network distillation".
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import holdfast as hf

DIALS = 14


class Lock(gym.Env):
    """Observation: how many dials are right. An episode has 60 steps."""

    observation_space, action_space = gym.spaces.Discrete(DIALS + 1), gym.spaces.Discrete(2)
    right = np.random.default_rng(0).integers(0, 2, DIALS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.steps = 0, 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at, self.steps = (self.at + 1 if action == self.right[self.at] else 0), self.steps + 1
        opened = self.at == DIALS
        return self.at, float(opened), opened, self.steps >= 60, {}


class RND(hf.RewardModel):
    def __init__(self, scale: float = 0.1) -> None:
        super().__init__()
        self.scale = scale
        self.fixed = nn.Sequential(nn.Linear(DIALS + 1, 64), nn.Tanh(), nn.Linear(64, 32)).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(DIALS + 1, 64), nn.Tanh(), nn.Linear(64, 32))
        self.optimizer = torch.optim.Adam(self.predictor.parameters(), lr=1e-3)
        self.register_buffer("size", torch.zeros(()))  # of the error, over the run

    def error(self, segment: hf.Segment) -> Tensor:
        x = nn.functional.one_hot(segment.obs.long(), DIALS + 1).float()
        return (self.predictor(x) - self.fixed(x)).square().mean(-1)  # [T, B]

    def reward(self, segment: hf.Segment) -> Tensor:
        error = self.error(segment)
        self.size.lerp_(error.mean(), torch.where(self.size == 0, 1.0, 0.05))
        return self.scale * error / self.size

    def update(self, segment: hf.Segment) -> None:
        for _ in range(4):
            self.optimizer.zero_grad()
            self.error(segment).mean().backward()
            self.optimizer.step()


def train(steps: int, model: RND | None) -> float:
    torch.manual_seed(1)
    config = hf.PPOConfig(
        total_steps=steps, num_envs=16, num_steps=64, core="gru", hidden_size=32, epochs=4, minibatches=4, quiet=True,
        tensorboard=False, checkpoint_every=0, threads=1,
    )  # fmt: skip
    return hf.Trainer(config, env=Lock, reward_model=model).run().mean_return


def main(arguments: list[str]) -> dict[str, float]:
    steps = int(arguments[0]) if arguments else 60_000
    return {"with": train(steps, RND()), "without": train(steps, None)}


if __name__ == "__main__":
    print(main(sys.argv[1:]))
