"""Environments whose actions have parts: in a Dict, or in a Tuple inside a Tuple. They check every action that they get."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

TOOL, PLACE, BITS = spaces.Discrete(3, start=1), spaces.Box(-2.0, 2.0, (2,), np.float32), spaces.MultiBinary(2)
SPACES = {
    "dict": spaces.Dict({"tool": TOOL, "place": PLACE, "bits": BITS}),
    "tuple": spaces.Tuple([TOOL, spaces.Tuple([PLACE, BITS])]),
}
OBS = spaces.Box(-10.0, 10.0, (3,), np.float32)


def nested(kind: str, tool: Any, place: Any, bits: Any) -> Any:
    """Things of the three parts, nested as the space is."""
    return {"tool": tool, "place": place, "bits": bits} if kind == "dict" else (tool, (place, bits))


def parts_of(kind: str, action: Any) -> tuple[Any, Any, Any]:
    """(tool, place, bits)"""
    return (action["tool"], action["place"], action["bits"]) if kind == "dict" else (action[0], *action[1])


class Parts(gym.Env):
    """Tool 1 + t % 3 is forbidden at step t, and the second bit always. masks: "info", "method" or None."""

    observation_space = OBS

    def __init__(self, kind: str = "dict", masks: str | None = None, length: int = 4) -> None:
        self.kind, self.masks, self.length = kind, masks, length
        self.action_space = SPACES[kind]
        self.last: Any = None
        if masks == "method":
            self.action_masks = self._mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), self._info()

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        tool, place, bits = parts_of(self.kind, action)
        if self.masks is not None:
            assert tool != 1 + self.t % 3 and bits[1] == 0, (self.t, action)
        self.last = action
        self.t += 1
        return self._observation(), float(tool) - float(abs(place).sum()), self.t == self.length, False, self._info()

    def _observation(self) -> Any:
        return np.array([self.t, *self.np_random.normal(size=2)], np.float32).clip(-10, 10)

    def _mask(self) -> Any:
        return nested(self.kind, np.arange(3) != self.t % 3, None, np.array([True, False]))

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._mask()} if self.masks == "info" else {}


class PartsVectorEnv:
    """B rows in numpy that can be saved: an action's numbers are in the next observation, so runs that differ show it."""

    def __init__(self, kind: str, num_envs: int = 4) -> None:
        self.kind, self.num_envs = kind, num_envs
        self.single_observation_space, self.single_action_space = OBS, SPACES[kind]
        self.observation_space, self.action_space = (batch_space(s, num_envs) for s in (OBS, SPACES[kind]))
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.t = np.zeros(num_envs, np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t[:] = np.arange(self.num_envs) % 3
        return np.zeros((self.num_envs, 3), np.float32), self._info()

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        tool, place, bits = parts_of(self.kind, action)
        self.t += 1
        ended = self.t == 5
        self.t[ended] = 0
        obs = np.stack([self.t, place.sum(1), tool + bits[:, 0]], 1).astype(np.float32)
        obs[ended] = 0.0
        rewards = (tool == 2) - abs(place - 0.5).sum(1)
        return obs, rewards, ended, np.zeros_like(ended), self._info()

    def _info(self) -> dict[str, Any]:
        tool = np.arange(3) != self.t[:, None] % 3
        return {"action_mask": nested(self.kind, tool, None, None)}

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t.copy()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.t[:] = saved["t"]

    def close(self) -> None:
        pass
