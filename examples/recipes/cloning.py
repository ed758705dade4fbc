"""Behaviour cloning before PPO: learn from recorded episodes first, then from rewards.

    python examples/recipes/cloning.py

    holdfast eval EXPERT_RUN --episodes 64 --num-envs 64 --record expert.npz         # records any trained policy
    cd examples/recipes; holdfast train --algorithm cloning:Cloning --recorded ../../expert.npz --core gru --total-steps 20000

A recording is dense, [T, B]: B environments, one episode after the other, with a flag where an episode begins. So it is trained on
like a rollout, with resets inside the sequences. Cloning is `hf.OnPolicy` with the recording in the place of what was played;
the rollouts only measure the clone. Its critic learns the returns of the recording, so that PPO can go on from both.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast as hf
from holdfast.heads import Categorical

TASK = "holdfast/RepeatPreviousEasy-v0"  # name the suit of AGO cards ago
AGO, SUITS = 3, 4


@dataclass
class CloningConfig(hf.OnPolicyConfig):
    recorded: str = hf.setting("")
    """File of recorded episodes, written by holdfast eval --record."""


class CloningLoss(hf.Loss):
    terms = ("clone_loss", "value_loss")

    def __call__(self, output: hf.PolicyOutput, batch: hf.Segment) -> dict[str, torch.Tensor]:
        log_prob = output.dist.log_prob(batch.actions.flatten(0, 1)).view(batch.resets.shape)
        clone_loss = -log_prob[batch.valid].mean()
        value_loss = 0.5 * (output.value - batch.returns)[batch.valid].square().mean()
        return {"loss": clone_loss + value_loss, "clone_loss": clone_loss, "value_loss": value_loss}


class Cloning(hf.OnPolicy):
    name = "cloning"
    Config = CloningConfig
    records = frozenset(("log_prob",))  # for the replay check
    evaluates_deterministically = False

    def __init__(self, policy: hf.RecurrentPolicy, config: CloningConfig, run: Any) -> None:
        super().__init__(policy, config, run)
        self.recording = segment_of(np.load(config.recorded), policy, config.gamma)

    @classmethod
    def make_policy(cls, config: CloningConfig, observation_space: Any, action_space: Any) -> hf.ActorCritic:
        return hf.ActorCritic.of_config(config, observation_space, action_space)

    def make_loss(self, segment: hf.Segment, progress: Any) -> CloningLoss:
        return CloningLoss()

    def start_update(self, segment: hf.Segment, progress: Any) -> Any:
        return super().start_update(self.recording, progress)


def segment_of(record: Any, policy: hf.RecurrentPolicy, gamma: float) -> hf.Segment:
    """Recorded steps as a segment [T, B]; steps of episodes that were not counted are not trained on."""
    part = {name: torch.as_tensor(record[name]) for name in record}
    num_envs = part["resets"].shape[1]
    nothing = torch.zeros_like(part["reward"])
    segment = hf.Segment(
        obs=part["obs"], actions=part["action"], resets=part["resets"], rewards=part["reward"], terminated=part["terminated"],
        truncated=part["truncated"], valid=part["valid"] & part["counted"], start_state=policy.initial_state(num_envs),
        value=nothing, last_value=nothing[0],
    )  # fmt: skip
    segment.chunk_states = [segment.start_state]
    _, segment.returns = hf.segment_advantages(segment, gamma, gae_lambda=1.0)
    return segment


# --- an expert, here a script: any policy could play this part --------------------------------------------------------


class LastCards(hf.Core):
    """Remembers the last cards, one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.output_size = SUITS, SUITS

    def row_shapes(self) -> dict[str, hf.RowShape]:
        return {"cards": hf.RowShape((AGO, SUITS))}

    def step(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        cards = torch.cat([state["cards"][:, 1:], x.unsqueeze(1)], 1)
        return state["cards"][:, 0], {"cards": cards}


class Expert(hf.RecurrentPolicy):
    """Names the suit of three cards ago, and errs in every fifth step or so."""

    def __init__(self) -> None:
        super().__init__(core=LastCards())

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(obs.long(), SUITS).float()

    def decode(self, features: torch.Tensor, action_mask: Any = None) -> tuple[Categorical, torch.Tensor]:
        return Categorical(2.5 * features), features.sum(1)


# --- the recipe -------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--clone-steps", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp())
    env = hf.envs.make(TASK, num_envs=flags.episodes)
    expert = hf.evaluate(Expert(), env, flags.episodes, seed=flags.seed, record=("obs", "action"))
    np.savez(folder / "expert.npz", **expert.record)

    same = dict(
        env=TASK, core="gru", hidden_size=64, num_envs=16, num_steps=64, learning_rate=2e-3, seed=flags.seed, quiet=True,
        tensorboard=False, checkpoint_every=0, threads=1,
    )  # fmt: skip
    config = CloningConfig(
        **same,
        recorded=str(folder / "expert.npz"),
        total_steps=flags.clone_steps,
        epochs=4,
        minibatches=8,
        run_dir=str(folder / "clone"),
    )
    clone = hf.Trainer(config, algorithm=Cloning)
    result = {"expert": expert.mean_return, "before": clone.evaluate(100).mean_return}
    result["clone"] = clone.run().mean_return
    for name, policy in (("clone, then ppo", hf.load(folder / "clone", allow_imports=True)), ("ppo alone", None)):
        config = hf.PPOConfig(**same, total_steps=flags.steps, run_dir=str(folder / name))
        result[name] = hf.Trainer(config, policy=policy).run().mean_return
    print("   ".join(f"{name} {value:.2f}" for name, value in result.items()))
    return result


if __name__ == "__main__":
    main()
