"""A tiny environment whose observations and rewards say who and when they are, and a policy one can do in one's head.

Several tests share it. An environment counts up: unit, 2 unit, 3 unit, ... from each episode's start.
The policy's memory is the sum of what it saw in the episode, and its value is that sum.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

import holdfast as hf
from holdfast.policies.heads import Categorical
from holdfast.state import RowShape, State

MODES = (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)


class CountingEnv(gym.Env[Any, Any]):
    """Episode n has `lengths[n % len]` steps and ends as `ends[n % len]` says: "terminated", "truncated" or "both".

    form: "vector" (shape [1]) or "dict" ({"count", "inner": {"step"}}). masks: None, "info" or "method"; then only the
    action `step % 2` is allowed, and nothing at all once the episode is over. overwrite: one array, changed in place,
    is returned always.
    """

    def __init__(
        self,
        unit: float = 1.0,
        reward: float = 1.0,
        lengths: tuple[int, ...] = (2,),
        ends: tuple[str, ...] = ("terminated",),
        form: str = "vector",
        masks: str | None = None,
        overwrite: bool = False,
        action_space: spaces.Space[Any] | None = None,
    ) -> None:
        self.unit, self.reward, self.lengths, self.ends = unit, reward, lengths, ends
        self.form, self.masks, self.overwrite = form, masks, overwrite
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        steps = spaces.Dict({"step": spaces.Discrete(1000)})
        self.observation_space = box if form == "vector" else spaces.Dict({"count": box, "inner": steps})
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.episode, self.t, self.over = -1, 0, True
        self.received: list[Any] = []
        self._array = np.zeros(1, np.float32)
        if masks == "method":
            self.action_masks = self._mask

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t, self.over = self.episode + 1, 0, False
        return self._obs(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert not self.over, "stepped after the end of an episode"
        self.received.append(np.copy(action))
        self.t += 1
        which = self.episode % len(self.lengths)
        self.over = self.t == self.lengths[which]
        end = self.ends[self.episode % len(self.ends)] if self.over else ""
        return self._obs(), self.reward, end in ("terminated", "both"), end in ("truncated", "both"), self._info()

    def _obs(self) -> Any:
        count = self.unit * (self.t + 1)
        if self.overwrite:
            self._array[:] = count
            array = self._array
        else:
            array = np.array([count], np.float32)
        return array if self.form == "vector" else {"count": array, "inner": {"step": self.t}}

    def _mask(self) -> np.ndarray[Any, Any]:
        return np.arange(2) == self.t % 2 if not self.over else np.zeros(2, bool)

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._mask()} if self.masks == "info" else {}


def vector_env(mode: AutoresetMode, *settings: dict[str, Any], copy: bool = True, **shared: Any) -> SyncVectorEnv:
    """gymnasium's own vector environment over a CountingEnv per dict of settings."""
    makers = [lambda s=s: CountingEnv(**{**shared, **s}) for s in settings]
    return SyncVectorEnv(makers, autoreset_mode=mode, copy=copy)


class Sum(hf.Core):
    """Adds up its input over the episode: y = s' = s + x, from 0 at a reset."""

    input_size = output_size = 1

    def row_shapes(self) -> State:
        return {"sum": RowShape((1,))}

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        before = state["sum"] if resets is None else state["sum"].masked_fill(resets.unsqueeze(1), 0.0)
        return before + x, {"sum": before + x}


class SumPolicy(hf.RecurrentPolicy):
    """Value: the sum of the episode's observations. Two actions; `slope` makes their odds depend on that sum."""

    def __init__(self, slope: float = 0.01) -> None:
        super().__init__(core=Sum())
        self.slope = nn.Parameter(torch.tensor(slope))

    def encode(self, obs: Any) -> Tensor:
        if isinstance(obs, dict):
            obs = obs["obs"] if "obs" in obs else obs["count"]
        return obs.float()

    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Any, Tensor]:
        logits = torch.cat([features * self.slope, torch.zeros_like(features)], 1)
        return Categorical(logits, action_mask), features[:, 0]
