"""Your own environment and policy, trained, measured and exported from the command line.

    cd examples
    holdfast train --env own_env_and_policy:Recall --policy own_env_and_policy:RecallPolicy --run-dir runs/recall
    holdfast eval runs/recall --env own_env_and_policy:Recall --policy own_env_and_policy:RecallPolicy
    holdfast export runs/recall --policy own_env_and_policy:RecallPolicy -o recall.onnx

`my_module:MyName` is found in the current folder or in an installed package. `main` runs the first two from Python.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import holdfast as hf
from holdfast.cli import main as holdfast
from holdfast.heads import Categorical

WAIT, LEFT, RIGHT = range(3)


class Recall(gym.Env):
    """A sign shows left or right, `delay` steps pass, then one turn: +1 if it follows the sign, -1 if not.

    Observation: the sign (-1 left, 1 right, 0 afterwards), and whether it is time to turn. `action_masks()` allows only
    waiting before that, and only a turn then.
    """

    def __init__(self, delay: int = 4) -> None:
        self.delay = delay
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.goal = 0, int(self.np_random.choice([LEFT, RIGHT]))
        return self._observation(), {}

    def step(self, action):
        turned = self.t == self.delay
        reward = 0.0 if not turned else 1.0 if action == self.goal else -1.0
        self.t += 1
        return self._observation(), reward, turned, False, {}

    def action_masks(self):
        turn = self.t == self.delay
        return np.array([not turn, turn, turn])

    def _observation(self):
        sign = 0.0 if self.t else -1.0 if self.goal == LEFT else 1.0
        return np.array([sign, float(self.t == self.delay)], np.float32)


class RecallPolicy(hf.RecurrentPolicy):
    """Made with the arguments it names out of observation_space, action_space and config."""

    def __init__(self, observation_space, action_space) -> None:
        super().__init__(core=hf.GRU(16, 16))
        self.encoder = nn.Linear(observation_space.shape[0], 16)
        self.actor, self.critic = nn.Linear(16, int(action_space.n)), nn.Linear(16, 1)

    def encode(self, obs):
        return torch.tanh(self.encoder(obs))

    def decode(self, features, action_mask=None):
        return Categorical(self.actor(features), action_mask), self.critic(features).squeeze(-1)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    flags = parser.parse_args(arguments)
    sys.path.insert(0, str(Path(__file__).parent))  # so that it works from any folder
    run = Path(tempfile.mkdtemp()) / "recall"
    names = ["--env", "own_env_and_policy:Recall", "--policy", "own_env_and_policy:RecallPolicy"]
    sizes = ["--num-envs", "16", "--num-steps", "32", "--learning-rate", "0.003", "--gamma", "0.95"]
    holdfast(["train", *names, *sizes, "--total-steps", str(flags.steps), "--run-dir", str(run)])
    holdfast(["eval", str(run), *names, "--episodes", "50"])
    return {"mean_return": json.loads((run / "result.json").read_text())["mean_return"]}


if __name__ == "__main__":
    main()
