"""Environments that play a table: observations, rewards, ends and masks follow one another in an order that is drawn once.

They are the same whatever the policy does, so a position in the table is all there is to save, and a second copy of an
environment says what the first one must have shown.
"""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

Array = np.ndarray[Any, Any]


class Table(gym.Env[Any, Any]):
    """masks: whether it allows only some of its actions."""

    def __init__(self, observation_space: Any, action_space: Any, seed: int, number: int, masks: bool = False) -> None:
        self.observation_space, self.action_space, self.masks = observation_space, action_space, masks
        observation_space.seed(seed)
        self.rows = [observation_space.sample() for _ in range(31)]
        draw = random.Random(seed)
        self.ends = [draw.choice(("", "", "", "terminated", "truncated", "both")) for _ in range(37)]
        self.rewards = [draw.gauss(0, 1) for _ in range(41)]
        self.allowed = [np.concatenate([_some(draw, count) for count in heads(action_space)]) for _ in range(29)]
        self.at = 5 * number

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at += 1
        return self.rows[self.at % 31], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        if self.masks:
            assert self._allows(action), f"{action!r} is not allowed by {self.action_mask()}"
        self.at += 1
        end = self.ends[self.at % 37]
        ends = end in ("terminated", "both"), end in ("truncated", "both")
        return self.rows[self.at % 31], self.rewards[self.at % 41], *ends, {}

    def action_mask(self) -> Array:
        return self.allowed[self.at % 29]

    def _allows(self, action: Any) -> bool:
        mask = self.action_mask()
        if isinstance(self.action_space, spaces.MultiBinary):
            return not np.asarray(action)[~mask].any()
        first = np.cumsum([0, *heads(self.action_space)[:-1]])
        chosen = np.atleast_1d(np.asarray(action) - getattr(self.action_space, "start", 0))
        return bool(mask[first + chosen].all())


class MaskedTable(Table):
    """With the method that vector environments look for."""

    def action_masks(self) -> Array:
        return self.action_mask()


class InfoMaskedTable(Table):
    """With masks in its infos."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**options)[0], {"action_mask": self.action_mask()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, _ = super().step(action)
        return *result, {"action_mask": self.action_mask()}  # type: ignore[return-value]


def heads(space: Any) -> list[int]:
    """Number of actions of each head that can be masked; all bits together are one."""
    if isinstance(space, (spaces.Discrete, spaces.MultiBinary)):
        return [int(space.n)]
    return [int(n) for n in space.nvec] if isinstance(space, spaces.MultiDiscrete) else [1]


def _some(draw: random.Random, count: int) -> Array:
    allowed = np.array([draw.random() < 0.6 for _ in range(count)])
    allowed[draw.randrange(count)] = True
    return allowed


class Tables(SyncVectorEnv):
    """Tables that can save their state."""

    def __init__(self, makers: list[Any], mode: str) -> None:
        super().__init__(makers, autoreset_mode=AutoresetMode[mode])

    def state_dict(self) -> dict[str, Any]:
        return {"at": [env.at for env in self.envs], "due": self._autoreset_envs.tolist()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for env, at in zip(self.envs, saved["at"]):
            env.at = at
        self._autoreset_envs = np.array(saved["due"])
