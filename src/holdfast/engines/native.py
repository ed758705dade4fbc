"""PPO's minibatches on a CPU without autograd: each part of an `ActorCritic` forward, then backward, in C. An accelerator for
`ClippedLoss`.

In a thin minibatch (one environment's 128 steps through 64 units) autograd's records, module calls and small operations
take as long as the arithmetic (docs/cpu.md). So do checks and addresses of arguments: for each size of minibatch they are
prepared once, on tensors that stay where they are. The numbers are those of autograd, to rounding.
`obstacles.py` says for which policies; every other one goes through autograd.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from holdfast.algorithms.loss import Loss
from holdfast.algorithms.ppo import ClippedLoss, LossSettings, PPOTerms, clipped_objective
from holdfast.engines.autograd import Minibatches
from holdfast.engines.native_batch import NativeBatch, objective_in_c
from holdfast.engines.native_passes import CorePasses, LayerPasses, Passes, cores_by_head, sum_of
from holdfast.engines.ranks import FlatGradients
from holdfast.kernels.cpu.adam import NativeAdam
from holdfast.kernels.cpu.objective import PreparedObjective, StoredSteps
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy, merge_time
from holdfast.rollout.segment import Segment
from holdfast.spans import span


class NativeMinibatches(Minibatches):
    """Gradients, clipping and Adam in C; ranks average gradients in between. Rebuilt for every update: modules may change."""

    def __init__(self, policy: RecurrentPolicy, *args: Any) -> None:
        super().__init__(policy, *args)
        assert isinstance(policy, ActorCritic)
        self._policy = policy
        self._adam = NativeAdam.try_create(self.optimizer, self.parameters)
        self._gradients = FlatGradients(self.parameters) if self._flat is None else self._flat

    @torch.no_grad()
    def load(self, batch: Segment, loss: Loss) -> None:
        super().load(batch, loss)
        assert isinstance(loss, ClippedLoss)
        self._settings = loss.settings
        self._batch = NativeBatch.of(self._policy, batch)
        self._by_size: dict[int | None, NativeMinibatch] = {}

    @torch.no_grad()
    def select(self, columns: Tensor | None) -> NativeMinibatch:
        size = None if columns is None else len(columns)
        found = self._by_size.get(size)
        if found is None:
            room = self._batch.everything(self._policy) if size is None else self._batch.new_selection(size)
            found = NativeMinibatch(self._policy, self._settings, room, self._gradients)
            self._by_size[size] = found
        if columns is not None:
            self._batch.select_into(self._policy, columns, found.batch)
        return found

    def gradients(self, part: NativeMinibatch, rank_weight: Any) -> Any:
        with span("forward and backward (without autograd)"):
            terms = part.run()
        if self.ranks.joined:
            with span("averaging gradients over ranks"):
                self._gradients.average(self.ranks, rank_weight)
        return terms

    def finish_step(self, terms: Any, rank_weight: Any) -> Tensor:
        """As the other engines do, in numbers of Python: seven small operations of torch would take longer than Adam."""
        with span("clipping and optimizer step"):
            norm = float(self.optimizer_step())
        with span("its metrics"):
            if not math.isfinite(norm):
                return torch.tensor([0.0] * 6 + [1.0])
            part, size = float(rank_weight) / self.ranks.size, self.ranks.size
            return torch.tensor([*(part * float(term) for term in terms[1:]), norm / size, 0.0])

    def optimizer_step(self) -> Tensor:
        if self._adam is None:  # before the first step of the run there are no moments to work on
            return super().optimizer_step()
        return torch.tensor(self._adam.step(self.config.max_grad_norm), dtype=torch.float64)


class NativeMinibatch:
    """The passes over a minibatch of one size: `run` leaves gradients in the policy's parameters."""

    @torch.no_grad()
    def __init__(
        self, policy: ActorCritic, settings: LossSettings, batch: NativeBatch, gradients: FlatGradients
    ) -> None:
        self.policy, self.settings, self.batch, self._gradients = policy, settings, batch, gradients
        self._forward: Passes = []
        self._backward: Passes = []
        T, B, _ = batch.encoded.shape
        trunk = LayerPasses(batch.encoded.flatten(0, 1), self._forward, policy.trunk)
        x = trunk.out.unflatten(0, (T, B))
        cores = {
            name: CorePasses(core, x, batch.states.get(name), batch.resets, self._forward)
            for name, core in cores_by_head(policy.core).items()
        }
        read_by = {head: cores.get(head) or cores[""] for head in ("actor", "critic")}
        features = {head: core.out.flatten(0, 1) for head, core in read_by.items()}
        actor = LayerPasses(features["actor"], self._forward, policy.actor_head, policy.actor)
        critic = LayerPasses(features["critic"], self._forward, policy.critic_head, policy.critic)
        d_logits, d_value = self._prepare_objective(actor.out, critic.out.flatten())

        gradient_of: dict[Tensor, Tensor] = dict(zip(gradients.parameters, gradients.parts))
        below = {
            head: bool(trunk.parameters) or len(list(core.core.parameters())) > 0 for head, core in read_by.items()
        }
        d_actor = actor.backward(d_logits, gradient_of, below["actor"], self._backward)
        d_critic = critic.backward(d_value.unsqueeze(1), gradient_of, below["critic"], self._backward)
        arriving: Tensor | None = None
        for name, core in cores.items():
            d = sum_of(d_actor, d_critic, self._backward) if name == "" else d_actor if name == "actor" else d_critic
            if d is not None:
                dx = core.backward(d.unflatten(0, (T, B)), gradient_of, bool(trunk.parameters), self._backward)
                arriving = sum_of(arriving, dx, self._backward)
        if trunk.parameters and arriving is not None:
            trunk.backward(arriving.flatten(0, 1), gradient_of, False, self._backward)

    @torch.no_grad()
    def run(self) -> PPOTerms:
        """Gradients of the loss of what `batch` holds now, and its terms."""
        for call in self._forward:
            call()
        terms = self._objective()
        for call in self._backward:
            call()
        self._gradients.attach()
        return terms

    # --- from the outputs of the heads to their gradients ------------------------------------------------------------

    def _prepare_objective(self, logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """logits [N, A], value [N]; where their gradients will be."""
        batch = self.batch
        self._logits, self._value = logits, value
        self._in_c: PreparedObjective | None = None
        if not objective_in_c(self.policy, batch.action_mask):
            self._d_logits, self._d_value = torch.empty_like(logits), torch.empty_like(value)
            return self._d_logits, self._d_value
        old = StoredSteps(batch.log_prob, batch.value, batch.advantage, batch.returns, batch.valid)
        self._in_c = PreparedObjective(logits, batch.actions, value, old, self.settings)
        return self._in_c.d_logits, self._in_c.d_value

    def _objective(self) -> PPOTerms:
        if self._in_c is None:
            return self._objective_of_any()
        self._in_c()
        return PPOTerms(*self._in_c.terms.unbind())

    def _objective_of_any(self) -> PPOTerms:
        """For any distribution: autograd from the loss to the outputs of the heads."""
        batch, policy = self.batch, self.policy
        T, B = batch.resets.shape
        mask = None if batch.action_mask is None else merge_time(batch.action_mask, T, B, "an action mask")
        own = list(policy.parameters(recurse=False))  # of the distribution: log_std
        for p in own:
            p.grad = None
        with torch.enable_grad():
            logits, value = self._logits.detach().requires_grad_(), self._value.detach().requires_grad_()
            dist = policy.distribution(logits, mask)
            log_prob, entropy = dist.log_prob(merge_time(batch.actions, T, B, "actions")), dist.entropy()
            new = (log_prob.view(T, B), entropy.view(T, B), value.view(T, B))
            terms = clipped_objective(*new, cast(Segment, batch), self.settings, batch.valid is None)
            # 1 + 0 * loss: a loss that is not finite makes its gradients so.
            (terms.loss * (1 + 0 * terms.loss.detach())).backward()
        assert logits.grad is not None and value.grad is not None
        self._d_logits.copy_(logits.grad)
        self._d_value.copy_(value.grad)
        part_of = dict(zip(self._gradients.parameters, self._gradients.parts))
        for p in own:
            part_of[p].copy_(p.grad) if p.grad is not None else part_of[p].zero_()
        return PPOTerms(*(term.detach() for term in terms))


class NativeGradient:
    """`NativeGradient(policy, settings)(segment)` leaves gradients in the policy's parameters."""

    def __init__(self, policy: ActorCritic, settings: LossSettings) -> None:
        self.policy, self.settings = policy, settings

    @torch.no_grad()
    def __call__(self, segment: Segment) -> PPOTerms:
        batch = NativeBatch.of(self.policy, segment).everything(self.policy)
        gradients = FlatGradients(list(self.policy.parameters()))
        return NativeMinibatch(self.policy, self.settings, batch, gradients).run()
