"""Small environments for the tests of the SB3 integration."""

from __future__ import annotations

import gymnasium as gym
import numpy as np


class Recall(gym.Env):
    """A cue is shown at the first step; act on it at every later one. Ends at random, terminated or truncated.

    kind: "vector", "image" (uint8 36x36) or "dict" observations. masked: of `actions` numbers only a tenth is allowed
    at a step, among them always the right one.
    """

    def __init__(self, kind="vector", actions=4, length=8, masked=False, end=0.1):
        self.kind, self.length, self.masked, self.end = kind, length, masked, end
        self.action_space = gym.spaces.Discrete(actions)
        vector = gym.spaces.Box(0, 1, (actions + 1,), np.float32)
        self.observation_space = {
            "vector": vector,
            "image": gym.spaces.Box(0, 255, (36, 36, 1), np.uint8),
            "dict": gym.spaces.Dict({"cue": vector, "clock": gym.spaces.Box(0, 1, (1,), np.float32)}),
        }[kind]

    def _observe(self):
        cue = np.zeros(self.action_space.n + 1, np.float32)
        cue[self.cue if self.t == 0 else -1] = 1
        if self.kind == "image":
            image = np.zeros((36, 36, 1), np.uint8)
            image[: 4 * (int(cue.argmax()) + 1)] = 255
            return image
        return cue if self.kind == "vector" else {"cue": cue, "clock": np.array([self.t / self.length], np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(self.action_space.n))
        self._choose_allowed()
        return self._observe(), {}

    def _choose_allowed(self):
        n = int(self.action_space.n)
        self.allowed = np.zeros(n, dtype=bool)
        self.allowed[self.np_random.permutation(n)[: max(1, n // 10)]] = True
        self.allowed[self.cue] = True

    def step(self, action):
        if self.masked and not self.allowed[action]:
            raise AssertionError(f"forbidden action {action}")
        reward = float(action == self.cue) if self.t else 0.0
        self.t += 1
        self._choose_allowed()
        terminated = bool(self.np_random.random() < self.end)
        return self._observe(), reward, terminated, not terminated and self.t >= self.length, {}


class MaskedRecall(Recall):
    def __init__(self, **kwargs):
        super().__init__(masked=True, **kwargs)

    def action_masks(self):
        return self.allowed
