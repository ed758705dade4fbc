"""Minibatches by autograd, one operation after another: the engine that takes every policy and every loss.

Also what all engines for minibatches share: selecting, averaging gradients over ranks, clipping, the optimizer step, the numbers
they report.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from holdfast.algorithms.auxiliary import AuxiliaryLosses
from holdfast.algorithms.loss import Loss
from holdfast.algorithms.optimizers import clipped_step
from holdfast.config import RunConfig
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy, autocast, autocast_dtype
from holdfast.rollout.segment import Segment
from holdfast.spans import span

_CACHE_LINE = 16
"""Floats in one. Each gradient begins at a line, because stores across two of them are slow."""


@torch.no_grad()
def copy_weights_from_leader(parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Weights initialized on different processors may differ slightly."""
    for p in parameters:
        p.copy_(ranks.sum(p if ranks.leads else torch.zeros_like(p)))


def average_gradient(gradient: Tensor, ranks: Ranks) -> None:
    """In place."""
    ranks.sum_(gradient).div_(ranks.size)


class FlatGradients:
    """Gradients of parameters as parts of one flat tensor, which ranks average by one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        counts = [p.numel() for p in parameters]
        padded = [-(-count // _CACHE_LINE) * _CACHE_LINE for count in counts]
        self._flat = parameters[0].detach().new_zeros(sum(padded) + len(parameters))
        *parts, self._present = self._flat.split([*padded, len(parameters)])
        self.parts = [part[:count].view(p.shape) for part, count, p in zip(parts, counts, parameters)]

    def attach(self) -> None:
        """Make the parts the parameters' `grad`."""
        for p, part in zip(self.parameters, self.parts):
            p.grad = part

    @torch.no_grad()
    def average(self, ranks: Ranks, weight: Any = 1.0) -> None:
        """Replace every gradient by the mean over ranks of `weight` times it; what is missing on some ranks counts as 0.

        A parameter that has no gradient on any rank keeps none, so that Adam leaves it alone.
        """
        missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        elsewhere = [(part, p.grad) for part, p in zip(self.parts, self.parameters) if p.grad is not part]
        copied = [(part, grad) for part, grad in elsewhere if grad is not None]
        if copied:
            torch._foreach_copy_([part for part, _ in copied], [grad for _, grad in copied])
        self._flat.mul_(weight)
        self._present.fill_(1.0)
        for i in missing:
            self.parts[i].zero_()
            self._present[i] = 0.0
        average_gradient(self._flat, ranks)
        absent = {i for i in missing if not self._present[i]}
        self.attach()
        for i in absent:
            self.parameters[i].grad = None


Terms = dict[str, Tensor]


class Minibatches:
    """One optimizer step at a time, forward and backward through autograd. `load` comes before the first `step`."""

    batch: Segment
    loss: Loss
    auxiliary: AuxiliaryLosses | None = None

    def __init__(
        self, policy: RecurrentPolicy, config: RunConfig, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE
    ) -> None:
        self.policy, self.config, self.optimizer, self.ranks = policy, config, optimizer, ranks
        self.parameters = list(policy.parameters())
        self._flat = FlatGradients(self.parameters) if ranks.joined else None

    @property
    def names(self) -> tuple[str, ...]:
        """What the numbers that `step` gives are."""
        own = () if self.auxiliary is None else self.auxiliary.names
        return (*self.loss.terms, *own, "grad_norm", "skipped")

    def load(self, batch: Segment, loss: Loss) -> None:
        """Take these training sequences and their loss."""
        self.batch, self.loss = batch, loss

    def step(self, columns: Tensor | None, rank_weight: Any = 1.0) -> Tensor:
        """One optimizer step on some columns of the batch (None: all): the numbers of `names`."""
        with span("minibatch"):
            with span("selecting its sequences"):
                part = self.select(columns)
            terms = self.gradients(part, rank_weight)
            return self.finish_step(terms, rank_weight)

    def select(self, columns: Tensor | None) -> Any:
        """Some columns of the batch (None: all), as `gradients` takes them."""
        return self.batch if columns is None else self.batch.select(columns)

    def gradients(self, part: Any, rank_weight: Any) -> Terms:
        """Leave the gradients of `rank_weight` times the loss in the parameters, averaged over ranks. If the loss is not finite,
        the gradients are not finite."""
        with span("forward and backward"):
            terms = self.backward(part, rank_weight)
        if self._flat is not None:
            with span("averaging gradients over ranks"):
                self._flat.average(self.ranks)
        return terms

    def columns_backward(self, columns: Tensor, rank_weight: Any) -> Any:
        """The gradients of this rank on some columns of the batch. Returns what `finish_step` takes."""
        return self.backward(self.batch.select(columns), rank_weight)

    def find_gradients(self) -> None:
        """Called after gradients have been written to new places."""

    def backward(self, part: Segment, rank_weight: Any) -> Terms:
        """The gradients of this rank."""
        with span("forward and loss"), autocast(part.resets.device, autocast_dtype(self.config.precision)):
            # Called as a module, so that hooks and torch.compile(policy) take part.
            given = part.obs, None, part.start_state, part.resets
            if self.auxiliary is None:
                terms = self.loss(self.policy(*given, action_mask=part.action_mask), part)
            else:
                features, output = self.policy(*given, action_mask=part.action_mask, with_features=True)
                terms = self.auxiliary.add(self.loss(output, part), features, output, part)
        with span("backward"):
            self.optimizer.zero_grad(set_to_none=True)
            # 1 + 0 * loss: a loss that is not finite makes its gradients so, on every rank, and the step is skipped.
            (terms["loss"] * (rank_weight * (1 + 0 * terms["loss"].detach()))).backward()
        return terms

    def finish_step(self, terms: Terms, rank_weight: Any) -> Tensor:
        """Step the optimizer and report; the reports of all ranks add up to the minibatch's."""
        with span("clipping and optimizer step"):
            norm = self.optimizer_step()
        with torch.no_grad(), span("its metrics"):
            numbers = torch.stack([terms[name].detach() for name in self.names[:-2]])
            if self.ranks.joined:
                numbers, norm = numbers * (rank_weight / self.ranks.size), norm / self.ranks.size
            skipped = ~norm.isfinite()
            return torch.cat([torch.where(skipped, 0.0, torch.cat([numbers, norm.view(1)])), skipped.float().view(1)])

    @torch.no_grad()
    def optimizer_step(self) -> Tensor:
        """Step with gradients scaled down to `max_grad_norm`; return their norm before that."""
        norms = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        clipped_step(self.optimizer, norm, self.config.max_grad_norm, (~norm.isfinite()).float())
        return norm


# --- what only autograd runs ------------------------------------------------------------------------------------------

# An ActorCritic that changes one of these computes something else than the C passes do.
_FIXED_METHODS = (
    "encode", "decode", "step", "unroll", "evaluate", "forward", "_encode", "_decode", "distribution", "_parts", "__call__", "losses",
)  # fmt: skip


def overridden_method(policy: ActorCritic) -> str | None:
    for name in _FIXED_METHODS:
        if getattr(type(policy), name) is not getattr(ActorCritic, name) or name in vars(policy):
            return f"{type(policy).__name__} overrides {name}"
    return None


def first_hook(policy: ActorCritic) -> str | None:
    if _has_any_global_hook():
        return "a global module hook is registered"
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, module in policy.named_modules():
        if any(getattr(module, kind) for kind in kinds):
            return f"{name or 'the policy'} has hooks"
    return None
