"""Proximal policy optimisation (Schulman et al., 2017) with memory: one page for the loss, one for the update.

Minibatches are whole sequences, each from the state the rollout had there, with resets inside: what is trained is what
was played. Nothing here touches memory or environments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.config import TrainConfig
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.engines.native import NativeGradient
from holdfast.engines.objective import ClippedObjective
from holdfast.kernels.cpu.adam import NativeAdam
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.segment import Segment
from holdfast.state import State, tree_map


class PPOTerms(NamedTuple):
    """The loss and its parts, all scalars."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def ppo_terms(
    policy: nn.Module,
    segment: Segment,
    *,
    clip_range: float = 0.2,
    clip_value: float | None = None,
    entropy_coef: float = 0.01,
    value_coef: float = 0.5,
    all_valid: bool = False,
) -> PPOTerms:
    """The clipped objective on a segment, with its parts. `all_valid`: no step needs masking out."""
    new = policy(segment.obs, segment.actions, segment.start_state, segment.resets, action_mask=segment.action_mask)

    stored = (segment.log_prob, segment.value, segment.advantage, segment.returns, None if all_valid else segment.valid)
    return PPOTerms(
        *ClippedObjective.apply(  # type: ignore[no-untyped-call]
            new.log_prob.float(), new.entropy.float(), new.value.float(), *stored,
            clip_range, clip_value, entropy_coef, value_coef,
        )
    )  # fmt: skip


def ppo_loss(policy: RecurrentPolicy, segment: Segment, **options: Any) -> Tensor:
    """The PPO loss of a whole segment, advantages normalised; options as `ppo_terms`'.

    loss = hf.ppo_loss(policy, segment); loss.backward()
    """
    return ppo_terms(policy, normalize_advantage(segment), **options).loss


def normalize_advantage(segment: Segment, ranks: Ranks = ALONE) -> Segment:
    """A copy with advantages of mean 0 and deviation 1 over its real steps, those of all `ranks` together."""
    real = segment.valid.float()
    n = ranks.sum(real.sum()).clamp(min=1)
    centred = segment.advantage - ranks.sum((segment.advantage * real).sum()) / n
    deviation = (ranks.sum((centred**2 * real).sum()) / n).sqrt()
    return replace(segment, advantage=centred / (deviation + 1e-8))


class PPO:
    """The update: epochs of minibatches over one rollout.

    With several `ranks` each has a part of the rollout and takes its share of every minibatch; what is averaged
    (losses, gradients, advantages) is averaged over the steps of all of them.
    """

    def __init__(
        self,
        policy: RecurrentPolicy,
        config: TrainConfig,
        training_leg: nn.Module | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.policy, self.config, self.ranks = policy, config, ranks
        self.training_leg = training_leg or policy  # what is called for gradients: the policy, or a wrapper such as DDP
        self.parameters = list(policy.parameters())
        if ranks.joined and training_leg is None:
            with torch.no_grad():  # as a wrapper would: made on other processors, weights may differ a little
                for p in self.parameters:
                    p.copy_(ranks.sum(p if ranks.leads else torch.zeros_like(p)))
        on_gpu = self.parameters[0].is_cuda  # there the rate is a tensor, so that a captured step can read it
        rate = torch.tensor(config.learning_rate, device=self.parameters[0].device) if on_gpu else config.learning_rate
        self.optimizer = torch.optim.Adam(self.parameters, lr=rate, eps=config.adam_eps, fused=True, capturable=on_gpu)
        self._graph: Any = None
        self._adam: NativeAdam | None = None  # for the steps of the update that runs
        self.generator = torch.Generator().manual_seed(ranks.seed(config.seed))
        self.autocast = torch.bfloat16 if config.precision == "bf16" else None

    def learning_rate(self, progress: float) -> float:
        """At a fraction of the run done."""
        if self.config.lr_schedule == "linear":
            return self.config.learning_rate * (1 - progress)
        if self.config.lr_schedule == "cosine":
            return self.config.learning_rate * 0.5 * (1 + float(torch.cos(torch.tensor(progress * torch.pi))))
        return self.config.learning_rate

    def update(self, segment: Segment, progress: float, all_valid: bool = False) -> dict[str, float]:
        """Train on one rollout; the metrics of it."""
        config, device = self.config, segment.resets.device
        rate = self.learning_rate(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        if config.normalize_advantage:
            segment = normalize_advantage(segment, self.ranks)
        batch = segment.columns(config.bptt)
        graphed, native_gradient = self._graphed(batch, all_valid), self._native_gradient()
        self._adam = None if native_gradient is None else NativeAdam.try_create(self.optimizer, self.parameters)
        sums, count = torch.zeros(7, device=device), 0
        for epoch in range(config.epochs):
            if config.refresh_states and epoch > 0 and batch is not segment:
                batch.start_state = self.refreshed_starts(segment)
                if graphed is not None:
                    graphed.load(batch)
            before, count_before = sums.clone(), count
            minibatches = self._minibatches(batch.num_envs, device)
            for columns, share in zip(minibatches, self._shares(batch.valid, minibatches)):
                if graphed is not None and columns is not None:
                    sums += graphed(columns, share)
                else:
                    part = batch if columns is None else batch.select(columns)
                    sums += self._step(part, all_valid, share, native_gradient)
                count += 1
            if config.target_kl is not None:
                kl, skipped = self.ranks.sum(sums - before)[[4, 6]].tolist()
                if kl > 1.5 * config.target_kl * max(1.0, count - count_before - skipped / self.ranks.size):
                    break
        *means, skipped = self.ranks.sum(sums).tolist()
        skipped /= self.ranks.size  # every rank skipped the same ones
        names = ("policy_loss", "value_loss", "entropy", "grad_norm", "approx_kl", "clip_fraction")
        taken = count - skipped or float("nan")
        metrics = {f"train/{name}": value / taken for name, value in zip(names, means)}
        metrics["train/explained_variance"] = _explained_variance(segment, self.ranks)
        metrics["train/skipped_steps"] = skipped  # optimiser steps not taken: loss or gradients were not finite
        metrics["train/learning_rate"] = rate
        metrics["train/epochs"] = float(epoch + 1)
        return metrics

    def _native_gradient(self) -> NativeGradient | None:
        """The gradient without autograd; None where that cannot be."""
        alone = self.training_leg is self.policy and not self.ranks.joined and self.autocast is None
        return NativeGradient.of(self.policy, self.config) if alone else None

    def _graphed(self, batch: Segment, all_valid: bool) -> Any:
        """The minibatch as a CUDA graph, loaded with this rollout; None where that cannot be."""
        device, joined = batch.resets.device, self.ranks.joined
        if device.type != "cuda" or self.training_leg is not self.policy:
            return None
        from holdfast.engines.cuda_graph import GraphedMinibatch

        size = batch.num_envs // self.config.minibatches
        equal = self.config.minibatches > 1 and batch.num_envs % self.config.minibatches == 0
        can = equal and batch.action_mask is None
        anew = can and (self._graph is None or not self._graph.fits(batch, size))
        if joined:  # all ranks replay or none does, all capture or none: what they exchange must match
            count_can, count_anew = self.ranks.sum(torch.tensor([can, anew], dtype=torch.int32, device=device)).tolist()
            can, anew = count_can == self.ranks.size, count_anew > 0
        if not can:
            return None
        if anew:
            gradients = lambda part, share: self._gradients(part, all_valid, share)  # noqa: E731
            average = self._average if joined else None
            self._graph = GraphedMinibatch(
                batch, size, gradients, self._take_step, self.parameters, self.optimizer, average
            )
        self._graph.load(batch)
        return self._graph

    def _shares(self, valid: Tensor, minibatches: list[Tensor | None]) -> list[Any]:
        """How much of each minibatch's real steps lies on this rank, times the number of ranks: what makes the average
        over ranks an average over steps."""
        if not self.ranks.joined:
            return [1.0] * len(minibatches)
        mine = torch.stack([(valid if c is None else valid.index_select(1, c)).sum() for c in minibatches]).double()
        return list((self.ranks.size * mine / self.ranks.sum(mine).clamp(min=1)).float())

    def _step(
        self, batch: Segment, all_valid: bool, share: Any = 1.0, native_gradient: NativeGradient | None = None
    ) -> Tensor:
        """One optimiser step. Its terms, and whether it was skipped; those of all ranks add up to the minibatch's."""
        if native_gradient is None:
            terms = self._gradients(batch, all_valid, share)
        else:
            terms = PPOTerms(*native_gradient(batch, all_valid))
        if self.ranks.joined and self.training_leg is self.policy:  # no wrapper has averaged them
            for p in self.parameters:
                if p.grad is not None:
                    self._average(p.grad)
        return self._take_step(terms, share)

    def _average(self, gradient: Tensor) -> None:
        gradient.copy_(self.ranks.sum(gradient)).div_(self.ranks.size)

    def _take_step(self, terms: PPOTerms, share: Any) -> Tensor:
        norm = self._descend()
        with torch.no_grad():
            part, whole = share / self.ranks.size, norm / self.ranks.size
            numbers = [terms.policy_loss, terms.value_loss, terms.entropy, whole, terms.approx_kl, terms.clip_fraction]
            numbers = [n if n is whole or not self.ranks.joined else n * part for n in numbers]
            skipped = ~norm.isfinite()
            return torch.cat([torch.where(skipped, 0.0, torch.stack(numbers)), skipped.float().view(1)])

    def _gradients(self, batch: Segment, all_valid: bool, share: Any) -> PPOTerms:
        config = self.config
        with self._precision(batch.resets.device):
            terms = ppo_terms(
                self.training_leg,
                batch,
                clip_range=config.clip_range,
                clip_value=config.clip_value,
                entropy_coef=config.entropy_coef,
                value_coef=config.value_coef,
                all_valid=all_valid,
            )
        self.optimizer.zero_grad(set_to_none=True)
        # 1 + 0 * loss: a loss that is not finite makes its gradients so, on every rank, and the step is skipped.
        (terms.loss * (share * (1 + 0 * terms.loss.detach()))).backward()
        return terms

    def _descend(self) -> Tensor:
        """The optimiser's step, on gradients of at most `max_grad_norm`; their norm before that."""
        if self._adam is not None:
            return torch.tensor(self._adam.step(self.config.max_grad_norm))
        norm = self._scale_gradients(self.config.max_grad_norm)
        self.optimizer.step()
        return norm

    @torch.no_grad()
    def _scale_gradients(self, max_norm: float) -> Tensor:
        """Have the optimiser scale gradients down to `max_norm`, and skip the step if they are not finite; their norm.

        The fused Adam divides by `grad_scale` as it goes and takes no step where `found_inf` is set: no extra pass over
        the parameters and no look at a number on the device.
        """
        norms = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self.optimizer.grad_scale = (norm / max_norm).clamp(min=1.0)  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        return norm

    def _precision(self, device: torch.device) -> Any:
        return torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)

    def _minibatches(self, columns: int, device: torch.device) -> list[Tensor | None]:
        if self.config.minibatches == 1:
            return [None]
        order = torch.randperm(columns, generator=self.generator).to(device)
        return list(order.tensor_split(self.config.minibatches))

    @torch.no_grad()
    def refreshed_starts(self, segment: Segment) -> State:
        """The start state of every chunk under the present weights, as `Segment.columns` lays them; the first stays."""
        length = self.config.bptt or segment.num_steps
        states, state = [], segment.start_state
        for begin in range(0, segment.num_steps, length):
            states.append(state)
            part = segment.steps(begin, begin + length)
            with self._precision(segment.resets.device):
                state = self.policy.evaluate(
                    part.obs, part.actions, state, part.resets, action_mask=part.action_mask, return_state=True
                ).state
        return tree_map(lambda *s: torch.cat(s), *states)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(d["optimizer"])
        self.generator.set_state(d["generator"])


def _explained_variance(segment: Segment, ranks: Ranks) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 a useless one."""
    returns, value = segment.returns[segment.valid], segment.value[segment.valid]
    _, (variance, unexplained), _ = ranks.moments(torch.stack([returns, returns - value], 1))
    return float(1 - unexplained / variance) if float(variance) > 0 else float("nan")
