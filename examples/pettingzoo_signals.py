"""A PettingZoo game with agents that leave: one policy plays all of them, and each has its own memory.

    python examples/pettingzoo_signals.py
    holdfast train --env pettingzoo:sisl.multiwalker_v9 --num-envs 24

Rows of the vector environment are agents. A row whose agent has left is not in the loss or the statistics until the
agent comes back, with fresh memory. Needs `pip install 'holdfast[pettingzoo]'`.
"""

from __future__ import annotations

import argparse
import tempfile

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv

import holdfast as hf


class Signals(ParallelEnv):
    """Each agent sees a sign of its own once. Agent k leaves after k + 2 steps: +1 if its last action is the sign, else -1."""

    metadata = {"name": "signals"}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents = [f"agent_{k}" for k in range(3)]
        self.spaces = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Discrete(2)
        self.render_mode = None

    def observation_space(self, agent):
        return self.spaces[0]

    def action_space(self, agent):
        return self.spaces[1]

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.agents, self.t = list(self.possible_agents), 0
        self.signs = {agent: int(self.random.integers(2)) for agent in self.agents}
        return {agent: self._observation(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        playing, self.t = self.agents, self.t + 1
        leaves = {agent: self.t == self.possible_agents.index(agent) + 2 for agent in playing}
        rewards = {a: (1.0 if actions[a] == self.signs[a] else -1.0) if leaves[a] else 0.0 for a in playing}
        self.agents = [agent for agent in playing if not leaves[agent]]
        seen = {agent: self._observation(agent) for agent in playing}
        return seen, rewards, leaves, dict.fromkeys(playing, False), {agent: {} for agent in playing}

    def _observation(self, agent):
        last = self.t == self.possible_agents.index(agent) + 1
        return np.array([0.0 if self.t else 2.0 * self.signs[agent] - 1.0, float(last)], np.float32)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    flags = parser.parse_args(arguments)
    config = hf.TrainConfig(
        core="gru", hidden_size=32, num_envs=24, num_steps=32, gamma=0.95, learning_rate=0.01, total_steps=flags.steps,
        device="cpu", run_dir=tempfile.mkdtemp() + "/signals",
    )  # fmt: skip
    return {"mean_return": hf.Trainer(config, env=Signals).run().mean_return}


if __name__ == "__main__":
    print(main())
