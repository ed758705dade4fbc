"""REINFORCE with a baseline, as somebody outside of Holdfast would write it: `--algorithm reinforce:Reinforce`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import holdfast as hf


@dataclass
class ReinforceConfig(hf.OnPolicyConfig):
    """Settings of a run with REINFORCE."""

    baseline_weight: float = hf.setting(0.5, low=0, short="baseline", search=hf.config.settings.Around(4))
    """Weight of the loss of the baseline."""


class ReinforceLoss(hf.Loss):
    terms = ("policy_loss", "baseline_loss")

    def __init__(self, gamma: float, baseline_weight: float) -> None:
        self.gamma, self.baseline_weight = gamma, baseline_weight

    def targets(self, segment: hf.Segment) -> hf.Segment:
        """Rewards to the end of the episode, or of the segment and the baseline's value there."""
        advantage, returns = hf.segment_advantages(segment, self.gamma, gae_lambda=1.0)
        return segment.changed(advantage=advantage, returns=returns)

    def __call__(self, output: hf.PolicyOutput, batch: hf.Segment) -> dict[str, torch.Tensor]:
        log_prob = output.dist.log_prob(batch.actions.flatten(0, 1)).view(batch.resets.shape)
        policy_loss = -(log_prob * batch.advantage)[batch.valid].mean()
        baseline_loss = 0.5 * ((output.value - batch.returns)[batch.valid] ** 2).mean()
        loss = policy_loss + self.baseline_weight * baseline_loss
        return {"loss": loss, "policy_loss": policy_loss.detach(), "baseline_loss": baseline_loss.detach()}


class Reinforce(hf.OnPolicy):
    name = "reinforce"
    Config = ReinforceConfig
    records = frozenset(("log_prob", "value"))
    evaluates_deterministically = False

    @classmethod
    def make_policy(cls, config: Any, observation_space: Any, action_space: Any) -> hf.ActorCritic:
        return hf.ActorCritic(observation_space, action_space, config.core, config.hidden_size)

    def make_loss(self, segment: hf.Segment, progress: Any) -> ReinforceLoss:
        return ReinforceLoss(self.config.gamma, self.config.baseline_weight)
