"""Meta-learning (RL squared): a policy that tries an unknown task out, remembers what it found, and uses it.

    python examples/recipes/meta_rl.py
    cd examples/recipes; holdfast train --env meta_rl:TwoArms --trial-episodes 16 --core gru --total-steps 60000

Every episode is one pull of a bandit's arm, so within an episode there is nothing to learn from. `trial_episodes` makes a trial of 16
episodes with the same arms: the memory runs through it, and the policy sees its previous action and reward.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np

import holdfast as hf

GOOD, BAD = 0.9, 0.1  # how often the arms pay


class TwoArms(gym.Env):
    """One pull per episode. `reset` draws which arm is good: in a trial it is the same one in every episode."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)  # nothing to see
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.good = self.np_random.integers(2)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        pays = self.np_random.random() < (GOOD if action == self.good else BAD)
        return np.zeros(1, np.float32), float(pays), True, False, {}


def train(steps: int, episodes: int, seed: int) -> list[float]:
    """The mean return of the first, second, ... episode of a trial."""
    config = hf.PPOConfig(
        total_steps=steps, trial_episodes=episodes, core="gru", hidden_size=32, num_envs=32, num_steps=64, epochs=4, minibatches=4,
        learning_rate=3e-3, gamma=0.9, seed=seed, quiet=True, tensorboard=False, checkpoint_every=0, threads=1,
    )  # fmt: skip
    trainer = hf.Trainer(config, env=TwoArms)
    result = trainer.run()
    return trainer.evaluate(500).returns_in_trial or [result.mean_return]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)
    returns, alone = train(flags.steps, flags.episodes, flags.seed), train(flags.steps, 1, flags.seed)
    print("trials:", " ".join(f"{value:.2f}" for value in returns), f"   single episodes: {alone[0]:.2f}")
    return {"first": returns[0], "last": returns[-1], "single": alone[0]}


if __name__ == "__main__":
    main()
