"""TMaze: a sign at the start of a corridor says which way to turn at its end.

    t = 0: sign                         position N: junction
    [ up/down | corridor | ... | corridor | junction ]

Observation, one-hot of 4: goal up, goal down (both shown at t = 0 only), corridor, junction. Actions: up,
down, forward. Up and down do nothing in the corridor, forward does nothing at the junction. Turning at the
junction ends the episode, `terminated`, with +1 for the right turn and -1 for the wrong one. After 3N steps
without a turn the episode is `truncated` with 0. All other rewards are 0.

The shortest solution takes N + 1 steps and returns 1. A deterministic policy without memory returns 0 on
average: at the junction it turns the same way whatever the sign said. (One that acts at random can be late
more often for one sign than for the other, which the time limit turns into a little return: 0.055 for N =
20.)
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
    """A corridor of `length` cells, the start included, and the junction after it."""

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
        self._right = torch.ones((), device=self.device)
        self._wrong = -self._right

    def draw(self) -> Tensor:
        return torch.randint(2, (self.num_envs,), generator=self.generator, device=self.device)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        state = {"goal": draws, "position": torch.zeros_like(draws), "steps": torch.zeros_like(draws)}
        return state, self._one_hot.index_select(0, draws)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        goal, position = state["goal"], state["position"]  # [B]: UP or DOWN; 0 to length
        turned = actions != FORWARD
        terminated = (position == self._length) & turned
        rewards = torch.where(actions == goal, self._right, self._wrong) * terminated

        steps = state["steps"] + 1
        truncated = (steps >= 3 * self._length) > terminated  # and not terminated
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
