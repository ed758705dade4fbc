"""A loss of your own in the trainer: the memory is told to keep what the task will ask for.

    python examples/auxiliary_loss.py

RepeatPrevious asks for the suit of 3 cards ago. A head on the memory is trained to name it, next to PPO's loss: a method `losses`
in the policy, and its weight in the config. The memory learns it long before rewards would teach it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import holdfast as hf

AGO = 3


class Recalling(hf.ActorCritic):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space, core="gru", hidden_size=64)
        self.recall = nn.Linear(64, 4)

    def losses(self, features: Tensor, output: hf.PolicyOutput, batch: hf.Segment) -> dict[str, Tensor]:
        T, B = batch.resets.shape
        episode = batch.resets.cumsum(0)  # a suit of an earlier episode is none of this one's
        known = (episode[AGO:] == episode[:-AGO]).flatten()
        guesses = self.recall(features).view(T, B, -1)[AGO:].flatten(0, 1)
        suits = batch.obs[:-AGO].flatten()
        wrong = nn.functional.cross_entropy(guesses, suits, reduction="none")
        return {"recall": torch.where(known, wrong, 0.0).sum() / known.sum().clamp(min=1)}


def train(steps: int, weight: float) -> dict[str, float]:
    torch.manual_seed(1)
    env = hf.envs.make("holdfast/RepeatPreviousEasy-v0", num_envs=1)
    policy = Recalling(env.single_observation_space, env.single_action_space)
    config = hf.PPOConfig(
        env="holdfast/RepeatPreviousEasy-v0", total_steps=steps, num_envs=16, num_steps=64, loss_weights={"recall": weight}, quiet=True,
        tensorboard=False, checkpoint_every=0, threads=1,
    )  # fmt: skip
    return {"mean_return": hf.Trainer(config, policy=policy).run().mean_return}


def main(arguments: list[str]) -> dict[str, float]:
    steps = int(arguments[0]) if arguments else 60_000
    return {"with": train(steps, 1.0)["mean_return"], "without": train(steps, 0.0)["mean_return"]}


if __name__ == "__main__":
    print(main(sys.argv[1:]))
