"""A curriculum: the task gets harder when the policy is good at it, and evaluations follow.

    python examples/recipes/curriculum.py

A sign in the first observation says which of two combinations opens a lock of 14 dials; a wrong dial begins again. Nobody finds the
combination by chance, so episodes begin with one dial left, then with two, and so on. All copies of the environment read one `Stage`
when an episode begins, and a callback moves it. So do the copies that evaluations play: by default they are at the stage that
training has reached. An `eval_env` with a stage of its own measures the task that you are after, from the first update on.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass

import gymnasium as gym
import numpy as np

import holdfast as hf

DIALS, STEPS = 14, 60
RIGHT = np.random.default_rng(0).integers(0, 2, (2, DIALS))  # [sign, dial]


@dataclass
class Stage:
    left: int
    """Dials that are left when an episode begins."""


class Lock(gym.Env):
    """Observation: the sign (-1 or 1, then 0), and how many dials are right, one-hot."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (DIALS + 2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first = self.at = DIALS - self.stage.left
        self.t, self.sign = 0, int(self.np_random.integers(2))
        return self.observe(), {}

    def observe(self):
        sign = 0.0 if self.t else 2.0 * self.sign - 1.0
        return np.concatenate([[sign], np.eye(DIALS + 1)[self.at]]).astype(np.float32)

    def step(self, action):
        self.at, self.t = (self.at + 1 if action == RIGHT[self.sign, self.at] else self.first), self.t + 1
        opened = self.at == DIALS
        return self.observe(), float(opened), opened, self.t == STEPS, {}


class Curriculum(hf.Callback):
    """One dial more whenever 0.8 of the last 100 episodes opened the lock."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.returns: deque[float] = deque(maxlen=100)

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        self.returns.extend(segment.episode_returns)
        if len(self.returns) == 100 and np.mean(self.returns) > 0.8 and self.stage.left < DIALS:
            self.stage.left += 1
            self.returns.clear()
            trainer.notify(f"{self.stage.left} dials")


def train(left: int, steps: int, seed: int) -> dict[str, float]:
    """The result on the whole lock, and how many dials were left in the last stage."""
    stage = Stage(left)
    config = hf.PPOConfig(
        core="gru", hidden_size=32, num_envs=16, num_steps=64, epochs=4, minibatches=8, learning_rate=3e-3, lr_schedule="constant",
        gamma=0.95, total_steps=steps, seed=seed, quiet=True, tensorboard=False, checkpoint_every=0, threads=1,
    )  # fmt: skip
    trainer = hf.Trainer(
        config, env=lambda: Lock(stage), callbacks=[Curriculum(stage)], eval_env=lambda: Lock(Stage(DIALS))
    )
    return {"result": trainer.run().mean_return, "left": stage.left}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)
    gradual, at_once = train(1, flags.steps, flags.seed), train(DIALS, flags.steps, flags.seed)
    print(
        f"opened: {gradual['result']:.2f} with a curriculum ({gradual['left']} dials reached), {at_once['result']:.2f} without"
    )
    return {"with": gradual["result"], "without": at_once["result"], "left": gradual["left"]}


if __name__ == "__main__":
    main()
