"""Parallelized Q-learning (PQN, Gallici et al., 2024) with memory: Q(lambda) targets over segments, no buffer, no target network.

    target[t] = r[t] + gamma * ((1 - lambda) * max Q[t+1] + lambda * target[t+1])        # 0 after a terminal step

with max Q from the rollout, which ends at the final observation where an episode was truncated. LayerNorm keeps the values
bounded in place of a target network. The loop over epochs and minibatches is `OnPolicy`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast import plain_checks as check
from holdfast.algorithms.base import Finish, Progress
from holdfast.algorithms.loss import Loss
from holdfast.algorithms.on_policy import OnPolicy
from holdfast.config import PQNConfig
from holdfast.distributed.metrics import Metric
from holdfast.policies.base import PolicyOutput, merge_time
from holdfast.policies.q_network import QNetwork
from holdfast.rollout.advantages import segment_advantages
from holdfast.rollout.exploration import EpsilonNoise
from holdfast.rollout.segment import Segment


class QLambdaLoss(Loss):
    """Half the squared distance of Q(observation, action) to its target."""

    terms = ("q_loss", "q_mean")

    def __init__(self, gamma: float, q_lambda: float, reward_scale: float) -> None:
        self.gamma, self.q_lambda, self.reward_scale = gamma, q_lambda, reward_scale

    def targets(self, segment: Segment) -> Segment:
        # The return of GAE is the lambda-return whose bootstraps are the recorded values: here max Q.
        _, returns = segment_advantages(segment, self.gamma, self.q_lambda, self.reward_scale)
        return segment.changed(returns=returns)

    def __call__(self, output: PolicyOutput, batch: Segment) -> dict[str, Tensor]:
        T, B = batch.resets.shape
        q = output.dist.of(merge_time(batch.actions, T, B, "actions")).view(T, B).float()
        count = q.numel() if batch.all_valid else batch.valid.sum().clamp(min=1)
        error = torch.where(batch.valid, q - batch.returns, 0.0)
        loss = 0.5 * (error**2).sum() / count
        return {
            "loss": loss,
            "q_loss": loss.detach(),
            "q_mean": torch.where(batch.valid, q, 0.0).detach().sum() / count,
        }


class PQN(OnPolicy):
    """Epsilon-greedy rollouts whose epsilon falls over the first part of the run."""

    name = "pqn"
    explores_with = "epsilon-greedy actions"
    Config = PQNConfig
    records = frozenset(("value", "params"))
    metrics = (
        Metric("train/q_loss", "q loss", short="q loss", digits=4),
        Metric("train/q_mean", "mean q", short="q"),
        Metric("train/epsilon", "epsilon", form="percent", short="epsilon"),
        *OnPolicy.metrics,
    )
    noise: EpsilonNoise

    @classmethod
    def make_policy(cls, config: PQNConfig, observation_space: Any, action_space: Any) -> QNetwork:
        return QNetwork.of_config(config, observation_space, action_space)

    def make_noise(self, num_envs: int) -> EpsilonNoise:
        self.noise = EpsilonNoise(num_envs, int(self.run.action_space.n), self.run.device)
        self.noise.epsilon.fill_(self.epsilon(0.0))
        return self.noise

    def make_loss(self, segment: Segment, progress: Progress) -> QLambdaLoss:
        scale = 1.0 if self.reward_scale is None else self.reward_scale.value
        return QLambdaLoss(self.config.gamma, self.config.q_lambda, scale)

    def epsilon(self, fraction: float) -> float:
        """At a fraction of the run."""
        config = self.config
        left = max(0.0, 1 - fraction / config.epsilon_decay) if config.epsilon_decay else 0.0
        return config.epsilon_end + (config.epsilon_start - config.epsilon_end) * left

    def start_update(self, segment: Segment, progress: Progress) -> Finish:
        finish, epsilon = super().start_update(segment, progress), self.epsilon(progress.fraction)
        following = (progress.update + 1) / progress.num_updates
        self.noise.epsilon.fill_(self.epsilon(following))  # of the next rollout
        return lambda: {**finish(), "train/epsilon": epsilon}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epsilon": float(self.noise.epsilon[0])}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        super().load_state_dict(d)
        self.noise.epsilon.fill_(d["epsilon"])

    def check(self, d: dict[str, Any]) -> None:
        super().check(d)
        check.number(d.get("epsilon"), "pqn epsilon", 0, 1)
