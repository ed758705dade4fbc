"""TMaze: a sign at the start of a corridor shows which way to turn at its end.

    t = 0: sign                         position N: junction
    [ up/down | corridor | ... | corridor | junction ]

Observation, one-hot of 4: goal up, goal down (both at t = 0 only), corridor, junction. Actions: up, down, forward. Up
and down do nothing in the corridor, forward does nothing at the junction. A turn at the junction ends the episode,
`terminated`, with +1 for the right turn and -1 for the wrong one. After 3N steps without a turn the episode is
`truncated` with 0. All other rewards are 0.

The shortest solution takes N + 1 steps and returns 1. A deterministic policy without memory returns 0 on average,
because it turns the same way at the junction whatever the sign showed. (A random policy can be too late more often for
one sign than for the other, and the time limit turns that into a small return: 0.055 for N = 20.)
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition

UP, DOWN, FORWARD = 0, 1, 2
SIGN_UP, SIGN_DOWN, CORRIDOR, JUNCTION = 0, 1, 2, 3


class TMaze(TorchVectorEnv):
    """A corridor of `length` cells, including the start, and a junction after it."""

    def __init__(self, num_envs: int, length: int = 20, device: torch.device | str = "cpu") -> None:
        if length < 2:
            raise ValueError(
                f"length is {length}; expected at least 2: in a shorter maze the sign is seen one step "
                "before the turn, and a policy without memory can wait instead of remembering"
            )
        space = Box(0.0, 1.0, (4,), dtype=np.float32)
        super().__init__(num_envs, space, Discrete(3), {"length": length}, device)
        self._length = length
        self._one_hot = torch.eye(4, dtype=torch.float32, device=self.device)
        self._reward = torch.ones((), device=self.device)
        self._penalty = -self._reward

    def draw(self) -> Tensor:
        return torch.randint(2, (self.num_envs,), generator=self.generator, device=self.device)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        state = {"goal": draws, "position": torch.zeros_like(draws), "steps": torch.zeros_like(draws)}
        return state, self._one_hot.index_select(0, draws)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        goal, position = state["goal"], state["position"]  # [B]: UP or DOWN; 0 to length
        turned = actions != FORWARD
        terminated = (position == self._length) & turned
        rewards = torch.where(actions == goal, self._reward, self._penalty) * terminated

        steps = state["steps"] + 1
        truncated = (steps >= 3 * self._length) > terminated  # at the limit, and not terminated
        done = terminated | truncated
        position = (position + ~turned).clamp_max(self._length)
        seen = (position == self._length) + CORRIDOR
        return Transition(
            state={
                "goal": torch.where(done, draws, goal),
                "position": position.masked_fill(done, 0),
                "steps": steps.masked_fill(done, 0),
            },
            obs=self._one_hot.index_select(0, torch.where(done, draws, seen)),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=self._one_hot.index_select(0, seen),
        )
