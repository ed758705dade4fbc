"""PositionOnlyPendulum and NoisyPositionOnlyPendulum: swing a pendulum up and hold it there, without seeing its speed.

The rules are those of POPGym's environments of these names, which use gymnasium's Pendulum. A step that costs c there gives
(1 - c / 8.1368022) / max_episode_length here, so an episode that stays upright returns 1. Episodes have max_episode_length
steps and end `truncated`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.popgym.noise import NoisyPosition

GRAVITY = 10.0  # m/s^2; the pendulum is a rod of 1 kg and 1 m
MAX_TORQUE, MAX_SPIN = 2.0, 8.0  # Nm, rad/s
SECONDS_PER_STEP = 0.05
START_ANGLE, START_SPIN = math.pi, 1.0  # rad, rad/s: starts are uniform between minus and plus this
HALF_OF_LARGEST_COST = 16.2736044 / 2


class PositionOnlyPendulum(TorchVectorEnv):
    """Observation: cosine and sine of the angle, which is 0 when upright. Action: a torque in Nm, [B, 1].

    The state is float64, as in gymnasium, and float32 on devices that have no float64.
    """

    def __init__(self, num_envs: int, max_episode_length: int = 200, device: torch.device | str = "cpu") -> None:
        if max_episode_length < 1:
            raise ValueError(f"max_episode_length is {max_episode_length}; expected at least 1")
        seen = Box(-1.0, 1.0, (2,), dtype=np.float32)
        torque = Box(-MAX_TORQUE, MAX_TORQUE, (1,), dtype=np.float32)
        super().__init__(num_envs, seen, torque, {"max_episode_length": max_episode_length}, device)
        self._dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._start = torch.tensor([START_ANGLE, START_SPIN], dtype=self._dtype, device=self.device)
        self._time_limit = max_episode_length

    def draw(self) -> Tensor:
        """[B, 2]: angle and spin at the start of an episode."""
        unit = torch.empty(self.num_envs, 2, dtype=self._dtype, device=self.device)
        return unit.uniform_(-1, 1, generator=self.generator) * self._start

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return {"motion": draws[:, :2].contiguous(), "steps": steps}, self.first_obs(draws)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        angle, spin = state["motion"].unbind(1)
        torque = actions.squeeze(1).clamp(-MAX_TORQUE, MAX_TORQUE)
        wrapped = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = wrapped**2 + 0.1 * spin**2 + 0.001 * torque**2
        push = 1.5 * GRAVITY * angle.sin() + 3.0 * torque
        next_spin = (spin + push * SECONDS_PER_STEP).clamp(-MAX_SPIN, MAX_SPIN)
        next_angle = angle + next_spin * SECONDS_PER_STEP

        steps = state["steps"] + 1
        truncated = steps >= self._time_limit
        moved = torch.stack((next_angle, next_spin), 1)
        final_obs = self.next_obs(next_angle, draws)
        return Transition(
            state={
                "motion": torch.where(truncated.unsqueeze(1), draws[:, :2], moved),
                "steps": steps.masked_fill(truncated, 0),
            },
            obs=torch.where(truncated.unsqueeze(1), self.first_obs(draws), final_obs),
            rewards=((HALF_OF_LARGEST_COST - cost) / (HALF_OF_LARGEST_COST * self._time_limit)).float(),
            terminated=torch.zeros_like(truncated),
            truncated=truncated,
            done=truncated,
            final_obs=final_obs,
        )

    def first_obs(self, draws: Tensor) -> Tensor:
        """What is seen at the start of an episode, from its motion in draws[:, :2]."""
        return _direction(draws[:, 0])

    def next_obs(self, angle: Tensor, draws: Tensor) -> Tensor:
        """What is seen after a step."""
        return _direction(angle)


class NoisyPositionOnlyPendulum(NoisyPosition, PositionOnlyPendulum):
    """Observation: cosine and sine of the angle, each plus Gaussian noise, clipped to [-1, 1]."""

    def first_obs(self, draws: Tensor) -> Tensor:
        return (_direction(draws[:, 0]) + draws[:, 2:4].float()).clamp(-1, 1)

    def next_obs(self, angle: Tensor, draws: Tensor) -> Tensor:
        return (_direction(angle) + draws[:, 4:].float()).clamp(-1, 1)


def _direction(angle: Tensor) -> Tensor:
    """[B, 2] float32: cosine and sine."""
    return torch.stack((angle.cos(), angle.sin()), 1).float()
