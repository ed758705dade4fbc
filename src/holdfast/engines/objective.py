"""`clipped_objective` with its gradient written by hand, as one autograd node.

Autograd would record about forty small operations, each as costly on a CPU as the arithmetic of a thin minibatch; the
gradient is three lines. `algorithms/ppo.py` says what is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.algorithms.ppo import LossSettings, PPOTerms
from holdfast.rollout.segment import Segment


def fused_objective(
    log_prob: Tensor, entropy: Tensor, value: Tensor, old: Segment, settings: LossSettings, all_valid: bool = False
) -> PPOTerms:
    """As `algorithms.ppo.clipped_objective`."""
    return PPOTerms(*_ClippedObjective.apply(log_prob, entropy, value, old, settings, all_valid))  # type: ignore[no-untyped-call]


class _ClippedObjective(torch.autograd.Function):
    """The fields of `PPOTerms`; only the loss can be differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        log_prob: Tensor,
        entropy: Tensor,
        value: Tensor,
        old: Segment,
        settings: LossSettings,
        all_valid: bool,
    ) -> tuple[Tensor, ...]:
        clip_range, clip_value, entropy_coef, value_coef = settings
        valid = None if all_valid else old.valid
        if valid is None:
            weight: Tensor | float = 1.0 / log_prob.numel()
        else:
            weight = valid.to(log_prob.dtype) / valid.sum().clamp(min=1)

        def mean(x: Tensor) -> Tensor:  # over real steps; a dummy step may hold anything
            return x.mean() if valid is None else torch.where(valid, x * weight, 0.0).sum()

        log_ratio = log_prob - old.log_prob
        ratio = log_ratio.exp()
        gain = old.advantage * ratio
        clipped_gain = old.advantage * ratio.clamp(1 - clip_range, 1 + clip_range)
        policy_loss = -mean(torch.minimum(gain, clipped_gain))

        error = value - old.returns
        squared = error * error
        if clip_value is not None:
            moved = value - old.value
            near = old.value + moved.clamp(-clip_value, clip_value) - old.returns
            worse = near * near > squared
            squared = torch.where(worse, near * near, squared)
            error = torch.where(worse, near * (moved.abs() <= clip_value), error)
        value_loss = 0.5 * mean(squared)

        mean_entropy = mean(entropy)
        loss = policy_loss + value_coef * value_loss - entropy_coef * mean_entropy
        approx_kl = mean(ratio - 1 - log_ratio)
        clip_fraction = mean(((ratio - 1).abs() > clip_range).to(ratio.dtype))

        d_log_prob = torch.where(gain <= clipped_gain, gain, 0.0) * -weight
        d_value = error * (weight * value_coef)
        if valid is not None:
            d_log_prob, d_value = torch.where(valid, d_log_prob, 0.0), torch.where(valid, d_value, 0.0)
        ctx.save_for_backward(d_log_prob, d_value)
        ctx.d_entropy = weight * -entropy_coef
        ctx.shape = entropy.shape
        parts = (policy_loss, value_loss, mean_entropy, approx_kl, clip_fraction)
        ctx.mark_non_differentiable(*parts)
        return (loss, *parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        d_log_prob, d_value = ctx.saved_tensors
        d_entropy = (d_loss * ctx.d_entropy).expand(ctx.shape)
        return d_log_prob * d_loss, d_entropy, d_value * d_loss, None, None, None
