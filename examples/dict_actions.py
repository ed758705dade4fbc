"""An action of several parts: which tool, and where to point it. A Dict action space, masks for one part, and memory.

    python examples/dict_actions.py

The first observation shows which of three tools to use and where; it is gone when the tool has to be used. In every step one of
the wrong tools is blocked.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np

import holdfast as hf

DELAY = 4


class Workshop(gym.Env):
    """Observation: the right tool (one-hot), the right place, whether it is time. Reward at the end: 1 for the right tool, less the
    distance to the right place. An action is {"tool": 0, "place": [0.3]}."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (5,), np.float32)
    action_space = gym.spaces.Dict(
        {"tool": gym.spaces.Discrete(3), "place": gym.spaces.Box(-1.0, 1.0, (1,), np.float32)}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.tool, self.place = 0, int(self.np_random.integers(3)), self.np_random.uniform(-1.0, 1.0)
        return self._observation(), self._info()

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action["tool"] == self.blocked:
            raise ValueError(f"tool {self.blocked} is blocked")
        last = self.t == DELAY
        reward = float(action["tool"] == self.tool) - abs(float(action["place"][0]) - self.place) if last else 0.0
        self.t += 1
        return self._observation(), reward, last, False, self._info()

    def _observation(self) -> Any:
        shown = [*np.eye(3)[self.tool], self.place] if self.t == 0 else [0.0] * 4
        return np.array([*shown, self.t == DELAY], np.float32)

    def _info(self) -> dict[str, Any]:
        self.blocked = (self.tool + int(self.np_random.integers(1, 3))) % 3
        allowed = np.ones(3, bool)
        allowed[self.blocked] = False
        return {"action_mask": {"tool": allowed}}  # a Box takes no mask


def train(steps: int, core: str = "gru", seed: int = 1) -> hf.Trainer:
    config = hf.PPOConfig(
        core=core, hidden_size=32, num_envs=16, num_steps=20, total_steps=steps, epochs=4, minibatches=4, seed=seed,
        learning_rate=3e-3, gamma=0.95, entropy_coef=0.003, quiet=True, tensorboard=False, checkpoint_every=0, threads=1,
    )  # fmt: skip
    trainer = hf.Trainer(config, env=Workshop)
    trainer.run()
    return trainer


def main(arguments: list[str]) -> dict[str, float]:
    trainer = train(int(arguments[0]) if arguments else 60_000)
    runner = hf.Runner(trainer.policy)  # one environment: an action as the environment takes it
    env, returns = Workshop(), []
    for seed in range(100):
        obs, info = env.reset(seed=seed)
        first, ended, total = True, False, 0.0
        while not ended:
            action = runner.act(obs, first, action_mask=info["action_mask"]).action
            obs, reward, ended, _, info = env.step(action)
            first, total = False, total + reward
        returns.append(total)
    return {"mean_return": float(np.mean(returns))}


if __name__ == "__main__":
    print(main(sys.argv[1:]))
