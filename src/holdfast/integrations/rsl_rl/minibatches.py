"""One minibatch of rsl_rl's PPO on Holdfast's engines: whole sequences with resets inside, one loss, no look at a number.

What is computed is rsl_rl's: its loss, its learning rate by KL divergence, gradients of actor and critic clipped each for
itself. `ActorAndCritic` is the training leg. On a GPU the step becomes a CUDA graph (`engines/graph_update.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rsl_rl.utils import resolve_optimizer
from torch import Tensor, nn

from holdfast.algorithms.ppo import ClippedLoss, LossSettings, clipped_objective
from holdfast.config import PPOConfig
from holdfast.engines.autograd import Minibatches, Terms
from holdfast.policies.base import autocast, autocast_dtype
from holdfast.rollout.segment import Segment

LOWEST_RATE, HIGHEST_RATE, RATE_FACTOR = 1e-5, 1e-2, 1.5  # of rsl_rl's adaptive schedule


class Output(NamedTuple):
    """What the models say about a segment now, [T, B] each; `params`: of the action distribution, [T, B, A] each."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    params: tuple[Tensor, ...]


class ActorAndCritic(nn.Module):
    """Both models as one module. Either may be an `RNNModel` of ours or a model of rsl_rl's without memory."""

    value_scale = None  # values are learned in reward units

    def __init__(self, actor: Any, critic: Any) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic

    def forward(self, obs: Any, actions: Tensor, state: Any, resets: Tensor) -> Output:
        distribution = self.actor.distribution
        out = _unroll(self.actor, obs, state["actor"], resets).float()
        distribution.update(out)
        log_prob, entropy = distribution.log_prob(actions), distribution.entropy
        with torch.no_grad():  # rsl_rl's distribution keeps its tensors: let them hold no graph
            distribution.update(out.detach())
        value = _unroll(self.critic, obs, state["critic"], resets).squeeze(-1).float()
        return Output(log_prob, entropy.expand_as(log_prob), value, tuple(distribution.params))


def _unroll(model: Any, obs: Any, state: Any, resets: Tensor) -> Tensor:
    if model.is_recurrent:
        return model.unroll(obs, state, resets)
    rows = {group: part.flatten(0, 1) for group, part in obs.items()}
    return model.mlp(model.get_latent(rows)).unflatten(0, resets.shape)


class MinibatchSettings(NamedTuple):
    """The settings of rsl_rl's PPO that a minibatch needs."""

    max_grad_norm: float
    desired_kl: float | None  # None: the learning rate stays
    normalize_advantage: bool  # within the minibatch
    mixed_precision: bool
    ranks: int


class RslRlMinibatches(Minibatches):
    """Forward and backward by autograd through Holdfast's kernels.

    The segment's `obs` holds two entries: "groups", the observations, and "old", the parameters of the action distribution
    in the rollout, from which the KL divergence is measured.
    """

    def __init__(self, policy: ActorAndCritic, settings: MinibatchSettings, optimizer: Any, rate: Tensor) -> None:
        config = PPOConfig(precision="bf16" if settings.mixed_precision else "fp32")
        super().__init__(policy, config, optimizer)  # type: ignore[arg-type]
        self.own, self.rate, self.models = settings, rate, policy

    def backward(self, part: Segment, rank_weight: Any) -> Terms:
        groups, old = part.obs["groups"], part.obs["old"]
        with autocast(part.resets.device, autocast_dtype(self.config.precision)):
            new = self.models(groups, part.actions, part.start_state, part.resets)
        if self.own.desired_kl is not None:
            self._adapt_rate(old, new.params, self.own.desired_kl)
        if self.own.normalize_advantage:
            advantage = part.advantage
            part = part.changed(advantage=(advantage - advantage.mean()) / (advantage.std() + 1e-8))
        assert isinstance(self.loss, ClippedLoss)
        terms = clipped_objective(new.log_prob, new.entropy, new.value, part, self.loss.settings, True)
        self.optimizer.zero_grad(set_to_none=True)
        (terms.loss * (1 + 0 * terms.loss.detach())).backward()  # a loss that is not finite skips the step
        if self.own.ranks > 1:
            self._average_gradients()
        return terms._asdict()

    @torch.no_grad()
    def _adapt_rate(self, old: tuple[Tensor, ...], new: tuple[Tensor, ...], desired: float) -> None:
        """rsl_rl's schedule: slower when the policy moved too far from the rollout's, faster when hardly at all."""
        kl = self.models.actor.distribution.kl_divergence(old, new).mean()
        if self.own.ranks > 1:
            dist.all_reduce(kl)
            kl = kl / self.own.ranks
        slower = (self.rate / RATE_FACTOR).clamp(min=LOWEST_RATE)
        faster = (self.rate * RATE_FACTOR).clamp(max=HIGHEST_RATE)
        hardly_moved = (kl < desired / 2) & (kl > 0)
        self.rate.copy_(torch.where(kl > desired * 2, slower, torch.where(hardly_moved, faster, self.rate)))

    def _average_gradients(self) -> None:
        """Over all ranks, in one exchange."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        parts = (flat / self.own.ranks).split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads)])

    @torch.no_grad()
    def optimizer_step(self) -> Tensor:
        """Clip actor and critic each for itself, then step; the norm of both before that."""
        models = (self.models.actor, self.models.critic)
        norms = [nn.utils.clip_grad_norm_(model.parameters(), self.own.max_grad_norm) for model in models]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        step_optimizer(self.optimizer, self.rate, norm.isfinite())
        return norm


# --- optimizers -------------------------------------------------------------------------------------------------------


def make_optimizer(name: str, parameters: list[nn.Parameter], rate: Tensor) -> torch.optim.Optimizer:
    """rsl_rl's optimizer of that name. Adam and AdamW are fused and read `rate`, which a captured step may change."""
    kind: Any = resolve_optimizer(name)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return kind(parameters, lr=rate, fused=True, capturable=rate.is_cuda)
    return kind(parameters, lr=float(rate))


def reads_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's learning rate is a tensor on the device, so that no step waits for it."""
    return isinstance(optimizer.param_groups[0]["lr"], Tensor)


def step_optimizer(optimizer: Any, rate: Tensor, finite: Tensor) -> None:
    """One step, or none if a gradient is not finite."""
    if reads_rate(optimizer):
        optimizer.found_inf = (~finite).float()
        optimizer.step()
        return
    for group in optimizer.param_groups:
        group["lr"] = float(rate)
    if bool(finite):
        optimizer.step()


def loss_settings(alg: Any) -> LossSettings:
    """rsl_rl's coefficients for our loss, which has a factor of 0.5 in its value loss."""
    clip_value = alg.clip_param if alg.use_clipped_value_loss else None
    return LossSettings(alg.clip_param, clip_value, alg.entropy_coef, 2.0 * alg.value_loss_coef)
