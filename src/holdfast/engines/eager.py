"""Minibatches by autograd, one operation after another: the engine that takes every policy. Also `hf.ppo_loss`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from holdfast.algorithms.ppo import PPOTerms, in_loss_units, normalize_advantage, ppo_terms
from holdfast.engines.minibatch import Minibatches
from holdfast.engines.objective import fused_objective
from holdfast.engines.ranks import FlatGradients
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.precision import autocast, autocast_dtype
from holdfast.rollout.segment import Segment
from holdfast.spans import span


def ppo_loss(policy: RecurrentPolicy, segment: Segment, **options: Any) -> Tensor:
    """The PPO loss of a whole segment, advantages normalized. Options: clip_range, clip_value, entropy_coef, value_coef.

    loss = hf.ppo_loss(policy, segment); loss.backward()
    """
    if not isinstance(policy, nn.Module) or not isinstance(segment, Segment):
        raise TypeError(
            f"ppo_loss takes a policy and a segment, got a {type(policy).__name__} and a {type(segment).__name__}; "
            "write hf.ppo_loss(policy, segment)"
        )
    scale = policy.value_scale
    segment = in_loss_units(normalize_advantage(segment), scale)
    return ppo_terms(policy, segment, value_scale=scale, objective=fused_objective, **options).loss


class AutogradMinibatches(Minibatches):
    """Forward and backward through autograd; averages the gradients of ranks unless `ddp_policy` does."""

    def gradients(self, part: Segment, share: Any) -> PPOTerms:
        with span("forward and backward"):
            terms = self.backward(part, share)
        if self.ranks.joined and self.ddp_policy is None:
            with span("averaging gradients over ranks"):
                FlatGradients(self.parameters).average(self.ranks)
        return terms

    def columns_backward(self, columns: Tensor, share: Any) -> Any:
        """The gradients of this rank on some columns of the batch. Returns what `finish_step` takes."""
        return self.backward(self.batch.select(columns), share)

    def find_gradients(self) -> None:
        """Called after gradients have been written to new places."""

    def backward(self, part: Segment, share: Any) -> PPOTerms:
        """The gradients of this rank."""
        with span("forward and loss"), autocast(part.resets.device, autocast_dtype(self.config.precision)):
            leg = self.ddp_policy or self.policy
            terms = ppo_terms(
                leg,
                part,
                settings=self.settings,
                all_valid=self.all_valid,
                value_scale=self.policy.value_scale,
                objective=fused_objective,
            )
        with span("backward"):
            self.optimizer.zero_grad(set_to_none=True)
            # 1 + 0 * loss: a loss that is not finite makes its gradients so, on every rank, and the step is skipped.
            (terms.loss * (share * (1 + 0 * terms.loss.detach()))).backward()
        return terms
