"""Environments that fail on purpose: `envs.make("failing_env:Failing-v0", ...)`, in this process or others."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

EPISODE = 6


class FailingEnv(gym.Env[Any, Any]):
    """Episodes of 6 steps, observation [t]. Fails at most `times` times, counted by files in `folder`.

    how: "raise", "leave", "hang" or "die", at step `at` of an episode; with `chance` at random instead. "nan obs" and "nan
    reward" are what they say. Actions: 0 or 1; 1 is rewarded.
    """

    def __init__(self, folder: str, how: str = "raise", at: int = 3, times: int = 1, chance: float = 0.0) -> None:
        self.folder, self.how, self.at, self.times, self.chance = Path(folder), how, at, times, chance
        self.observation_space = spaces.Box(-10, 10, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        fails = self.np_random.random() < self.chance if self.chance else self.t == self.at
        obs, reward = self._obs(), float(action)
        if fails and self._one_more():
            if self.how == "raise":
                raise ValueError("the simulator fell over")
            if self.how == "leave":
                sys.exit(3)
            if self.how == "hang":
                time.sleep(1000)
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            obs = obs * np.nan if self.how == "nan obs" else obs
            reward = np.nan if self.how == "nan reward" else reward
        return obs, reward, self.t == EPISODE, False, {}

    def _obs(self) -> Any:
        return np.array([self.t], np.float32)

    def _one_more(self) -> bool:
        """Take one of `times` numbers; the first to create its file has it."""
        for number in range(self.times):
            try:
                (self.folder / f"failure {number}").touch(exist_ok=False)
                return True
            except FileExistsError:
                continue
        return False


class SavingVectorEnv(VectorEnv[Any, Any, Any]):
    """Random observations and rewards in episodes of 6 steps, from a generator that it saves. Raises once, at step `at`.

    Counted from the first reset, over all rebuilds, by a file in `folder`; `mask_at` raises in `action_masks()` instead.
    """

    def __init__(self, num_envs: int, folder: str, at: int = 0, mask_at: int = 0) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs, self.folder, self.at, self.mask_at = num_envs, Path(folder), at, mask_at
        self.single_observation_space, self.single_action_space = (
            spaces.Box(-10, 10, (2,), np.float32),
            spaces.Discrete(2),
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.t += 1
        if self.t == self.at:
            self._fail_once()
        last = self._obs()
        ends = np.full(self.num_envs, self.t % EPISODE == 0)
        obs = self._obs() if ends.any() else last
        rewards = self.np_random.random(self.num_envs) * actions
        info = {"final_obs": last} if ends.any() else {}
        return obs, rewards, np.zeros(self.num_envs, bool), ends, info

    def action_masks(self) -> Any:
        if self.t == self.mask_at and self.mask_at:
            self._fail_once()
        return np.ones((self.num_envs, 2), bool)

    def _obs(self) -> Any:
        return self.np_random.normal(size=(self.num_envs, 2)).astype(np.float32)

    def _fail_once(self) -> None:
        marker = self.folder / "failed"
        if not marker.exists():
            marker.touch()
            raise ValueError("the simulator fell over")

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "generator": json.dumps(self.np_random.bit_generator.state)}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        self.t = d["t"]
        self.np_random.bit_generator.state = json.loads(d["generator"])


gym.register("Failing-v0", entry_point="failing_env:FailingEnv")
gym.register("Saving-v0", vector_entry_point="failing_env:SavingVectorEnv")
