"""PositionOnlyCartPole: balance a pole without seeing velocities. POPGym's other views of it are in `popgym/cartpole.py`.

The rules are those of POPGym's environment of the same name, which uses gymnasium's CartPole. Each step gives
1 / max_episode_length, including the step that drops the pole, so a full episode returns 1. If the pole falls or the
cart leaves the track, the episode is `terminated`; at the time limit it is `truncated`. Both can be true at once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition

GRAVITY = 9.8  # m/s^2
POLE_MASS, TOTAL_MASS = 0.1, 1.1  # kg
HALF_POLE = 0.5  # m
PUSH = 10.0  # N
SECONDS_PER_STEP = 0.02
TRACK_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360  # m, rad
START_RANGE = 0.05


class PositionOnlyCartPole(TorchVectorEnv):
    """Observation: cart position in m and pole angle in rad. Action: push left (0) or right (1).

    The state is float64, as in gymnasium, and float32 on devices that have no float64.
    """

    inputs = ("obs", "prev_action")

    def __init__(self, num_envs: int, max_episode_length: int = 200, device: torch.device | str = "cpu") -> None:
        if max_episode_length < 1:
            raise ValueError(f"max_episode_length is {max_episode_length}; expected at least 1")
        settings = {"max_episode_length": max_episode_length}
        super().__init__(num_envs, self.seen_space(), Discrete(2), settings, device)
        self._dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._limits = torch.tensor([TRACK_LIMIT, ANGLE_LIMIT], dtype=self._dtype, device=self.device)
        self._high = 2 * self._limits.float()  # of observations
        self._push = torch.tensor([-PUSH, PUSH], dtype=self._dtype, device=self.device) / TOTAL_MASS
        self._time_limit = max_episode_length

    def draw(self) -> Tensor:
        start = torch.empty(self.num_envs, 4, dtype=self._dtype, device=self.device)
        return start.uniform_(-START_RANGE, START_RANGE, generator=self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return {"motion": draws[:, :4].contiguous(), "steps": steps}, self.first_obs(draws)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        next_places, next_speeds = move(state["motion"], self._push.index_select(0, actions))
        steps = state["steps"] + 1
        terminated = (next_places.abs() > self._limits).any(-1)
        truncated = steps >= self._time_limit
        done = terminated | truncated
        next_motion = torch.where(done.unsqueeze(1), draws[:, :4], torch.cat((next_places, next_speeds), 1))
        final_obs = self.next_obs(next_places, next_speeds, draws)
        return Transition(
            state={"motion": next_motion, "steps": steps.masked_fill(done, 0)},
            obs=torch.where(done.unsqueeze(1), self.first_obs(draws), final_obs),
            rewards=torch.full((self.num_envs,), 1 / self._time_limit, device=self.device),
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=final_obs,
        )

    def seen_space(self) -> Box:
        """The space of observations: twice what is still upright and on the track."""
        high = np.array([2 * TRACK_LIMIT, 2 * ANGLE_LIMIT], dtype=np.float32)
        return Box(-high, high, dtype=np.float32)

    def first_obs(self, draws: Tensor) -> Tensor:
        """What is seen at the start of an episode, from its motion in draws[:, :4]."""
        return draws[:, :2].float()

    def next_obs(self, places: Tensor, speeds: Tensor, draws: Tensor) -> Tensor:
        """What is seen after a step."""
        return places.float()


def move(motion: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """Places and speeds [B, 2] after a step, from motion [B, 4] (position, angle, their velocities) and push [B]."""
    places, speeds = motion[:, :2], motion[:, 2:]
    next_places = torch.add(places, speeds, alpha=SECONDS_PER_STEP)
    return next_places, torch.add(speeds, accelerations(motion, push), alpha=SECONDS_PER_STEP)


def accelerations(motion: Tensor, push: Tensor) -> Tensor:
    """[B, 2]: of the cart in m/s^2 and of the pole in rad/s^2, from motion [B, 4] and push / total mass [B].

    The frictionless cart and pole of Barto, Sutton and Anderson, as gymnasium computes it.
    """
    _, angle, _, spin = motion.unbind(1)
    sin, cos = angle.sin(), angle.cos()
    pole_share = HALF_POLE * POLE_MASS / TOTAL_MASS
    drive = torch.addcmul(push, spin * spin, sin, value=pole_share)
    inertia = torch.rsub(cos * cos, HALF_POLE * 4 / 3, alpha=pole_share)
    angular = (sin * GRAVITY - cos * drive) / inertia
    linear = torch.addcmul(drive, angular, cos, value=-pole_share)
    return torch.stack((linear, angular), 1)
