"""Action masks and memory together in Stable-Baselines3: 20 actions, 90% of them forbidden at every step.

    python examples/sb3_masked.py                     # about half a minute on one core

A number is shown once, at the start of an episode, and is the right answer at every later step. Which actions are
allowed changes from step to step; the environment says so in `action_masks()`, as for MaskablePPO. `RecurrentPPO`
finds that method by itself. The environment raises on a forbidden action, so a run that ends has taken none.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.env_util import make_vec_env

from holdfast.integrations.sb3 import RecurrentPPO

ACTIONS, ALLOWED, LENGTH = 20, 2, 8


class MaskedRecall(gym.Env):
    """Show a number, then ask for it LENGTH times; it and one other action are allowed."""

    observation_space = gym.spaces.Box(0, 1, (ACTIONS + 1,), np.float32)
    action_space = gym.spaces.Discrete(ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.number = 0, int(self.np_random.integers(ACTIONS))
        self._draw_allowed()
        return self._observe(), {}

    def step(self, action):
        if not self.allowed[action]:
            raise AssertionError(f"action {action} is forbidden")
        reward = float(action == self.number) if self.t else 0.0
        self.t += 1
        self._draw_allowed()
        return self._observe(), reward, self.t > LENGTH, False, {}

    def action_masks(self) -> np.ndarray:
        return self.allowed

    def _draw_allowed(self):
        self.allowed = np.zeros(ACTIONS, dtype=bool)
        self.allowed[self.np_random.choice(ACTIONS, ALLOWED, replace=False)] = True
        if not self.allowed[self.number]:
            self.allowed[np.flatnonzero(self.allowed)[0]] = False
            self.allowed[self.number] = True

    def _observe(self):
        obs = np.zeros(ACTIONS + 1, np.float32)
        obs[self.number if self.t == 0 else ACTIONS] = 1
        return obs


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    env = make_vec_env(MaskedRecall, n_envs=16, seed=args.seed)
    model = RecurrentPPO(
        "MlpLstmPolicy", env, n_steps=64, batch_size=256, n_epochs=5, learning_rate=2e-3, ent_coef=0.01, gamma=0.9,
        policy_kwargs={"lstm_hidden_size": 64, "net_arch": [64]}, seed=args.seed, device="cpu",
    )  # fmt: skip
    model.learn(args.steps)
    mean = sum(e["r"] for e in model.ep_info_buffer) / max(1, len(model.ep_info_buffer))
    print(f"{model.num_timesteps} steps, none forbidden; right answers: {mean / LENGTH:.2f} (without memory 0.5)")
    return {"steps": model.num_timesteps, "right": mean / LENGTH}


if __name__ == "__main__":
    main()
