"""A privileged teacher and its recurrent student: learn the task with everything in view, then teach a policy that has to remember.

    python examples/recipes/distillation.py

A simulator shows more than sensors do. The teacher sees all of it and learns by PPO, without memory. The student sees positions
only, and it is the student who plays: in every state that it comes to, the teacher says what it would do, and the student's loss is
its distance from that (DAgger, with distributions). So it also learns how to come back from its own mistakes.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import holdfast as hf


class CartPole(gym.ObservationWrapper):
    """CartPole as a Dict: what sensors see, and what only the simulator knows."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        part = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gym.spaces.Dict({"positions": part, "velocities": part})

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"positions": observation[[0, 2]], "velocities": observation[[1, 3]]}


@dataclass
class DistillationConfig(hf.OnPolicyConfig):
    teacher: str = hf.setting("")
    """Folder of the run of the teacher."""


class TeacherLoss(hf.Loss):
    """The divergence of the student's action from the teacher's."""

    terms = ("kl",)

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits  # [T, B, actions], of the teacher

    def targets(self, segment: hf.Segment) -> hf.Segment:
        return segment.changed(params=self.logits)

    def __call__(self, output: hf.PolicyOutput, batch: hf.Segment) -> dict[str, torch.Tensor]:
        teacher = batch.params.log_softmax(-1)
        student = output.dist.logits.log_softmax(-1).view_as(teacher)
        kl = (teacher.exp() * (teacher - student)).sum(-1)[batch.valid].mean()
        return {"loss": kl, "kl": kl}


class Distillation(hf.OnPolicy):
    name = "distillation"
    Config = DistillationConfig
    records = frozenset(("log_prob",))  # for the replay check
    evaluates_deterministically = False

    def __init__(self, policy: hf.RecurrentPolicy, config: DistillationConfig, run: Any) -> None:
        super().__init__(policy, config, run)
        self.teacher = hf.load(config.teacher, device=str(run.device)).eval()
        self.state: Any = None  # of a teacher with memory: after the last segment

    @classmethod
    def make_policy(cls, config: DistillationConfig, observation_space: Any, action_space: Any) -> hf.ActorCritic:
        return hf.ActorCritic.of_config(config, observation_space, action_space)

    def make_loss(self, segment: hf.Segment, progress: Any) -> TeacherLoss:
        with torch.no_grad():
            said = self.teacher.unroll(segment.obs, self.state, segment.resets)
        self.state = said.state
        return TeacherLoss(said.dist.logits.view(*segment.resets.shape, -1))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher-steps", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp())
    same = dict(
        num_envs=8, num_steps=128, epochs=10, minibatches=8, seed=flags.seed, quiet=True, tensorboard=False, checkpoint_every=0,
        threads=1, final_eval_episodes=40,
    )  # fmt: skip
    config = hf.PPOConfig(
        **same, core="none", hidden_size=64, total_steps=flags.teacher_steps, run_dir=str(folder / "teacher")
    )
    result = {"teacher": hf.Trainer(config, env=CartPole).run().mean_return}
    for name, core in (("student", "gru"), ("student without memory", "none")):
        config = DistillationConfig(
            **same, core=core, hidden_size=64, actor_obs=("positions",), teacher=str(folder / "teacher"), learning_rate=3e-3,
            total_steps=flags.steps, run_dir=str(folder / name),
        )  # fmt: skip
        result[name] = hf.Trainer(config, env=CartPole, algorithm=Distillation).run().mean_return
    print("   ".join(f"{name} {value:.1f}" for name, value in result.items()))
    return result


if __name__ == "__main__":
    main()
