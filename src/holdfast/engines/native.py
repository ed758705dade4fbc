"""An `ActorCritic` on a CPU without autograd and modules: minibatches of PPO and steps of rollouts, in C.

In a thin minibatch (one environment's 128 steps through 64 units) autograd's records, module calls and small operations take as
long as the arithmetic (docs/performance/cpu.md), and so do checks and addresses of arguments: for each size of minibatch they are
prepared once, on tensors that stay where they are. Between two steps of small environments most of the policy's time is Python.
The numbers are those of autograd and of `policy.step`, to rounding. An accelerator for `ClippedLoss`; `native_obstacle` says for
which policies.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.algorithms.loss import Loss
from holdfast.algorithms.ppo import ClippedLoss, LossSettings, PPOTerms, clipped_objective
from holdfast.checks import is_debug
from holdfast.cores import GRU, LSTM, Block, Memoryless, Parallel
from holdfast.cores.gated import GatedCore
from holdfast.engines.autograd import FlatGradients, Minibatches, first_hook, overridden_method
from holdfast.engines.native_parts import (
    CorePasses,
    LayerPasses,
    NativeBatch,
    NativeSteps,
    Passes,
    cores_by_head,
    objective_in_c,
    sum_of,
)
from holdfast.kernels import dispatch
from holdfast.kernels.cpu import recurrence as native_kernel
from holdfast.kernels.cpu.update import NativeAdam, PreparedObjective, StoredSteps, layers_of
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy, merge_time
from holdfast.rollout.collector import Acted, Acting
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
        if self._adam is None:  # another optimizer, or no step taken yet: there are no moments to work on
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


# --- rollouts -----------------------------------------------------------------------------------------------------------


class NativeActing(Acting):
    """As `Acting`, for all environments at once."""

    _steps: NativeSteps | None = None

    def begin(self, adapter: Any, steps: int) -> None:
        super().begin(adapter, steps)
        # Prepared for each rollout: weights may lie elsewhere, modules may have been replaced.
        self._steps = NativeSteps(self.policy, adapter.num_envs)

    def act(self, obs: Any, resets: Tensor, mask: Any, rows: Tensor | None) -> Acted:
        assert self._steps is not None
        drawn = None if self.noise is None else self.noise.advance(resets)
        state, _ = self.memory.take(len(resets))
        step, state = self._steps.act(obs, state, resets, mask, drawn)
        self.memory.put(state, None)
        return Acted(*step)

    def value(self, obs: Any, resets: Tensor | None, rows: Tensor | None = None) -> Tensor:
        assert self._steps is not None
        with span("values for bootstrapping"):
            return self._steps.value(obs, self.memory.take(self.memory.num_envs)[0], resets)

    def add_final(self, t: int, final_obs: Any, truncated: Tensor) -> None:
        self._finals[t] = torch.where(truncated, self.value(final_obs, None), 0.0)  # C takes all rows at once

    def finish(self) -> None:
        self._steps = None


# --- for which policies --------------------------------------------------------------------------------------------------


def native_obstacle(policy: nn.Module) -> str | None:
    """The first reason why this policy cannot run in C; None if it can."""
    if not isinstance(policy, ActorCritic):
        return f"{type(policy).__name__} is not an hf.ActorCritic"
    if is_debug() or torch.is_anomaly_enabled():
        return "debugging is on"
    if policy.critic_encoder is not None:
        return "actor and critic see different observations"
    for find in (overridden_method, first_hook, _parameter, _layer, _core):
        reason = find(policy)
        if reason is not None:
            return reason
    return None


def _parameter(policy: ActorCritic) -> str | None:
    for name, p in policy.named_parameters():
        if p.dtype != torch.float32 or not p.is_cpu:
            return f"{name} is {str(p.dtype).removeprefix('torch.')} on {p.device.type}, not float32 on cpu"
        if not p.requires_grad:
            return f"{name} is frozen"
        if not p.is_contiguous():
            return f"{name} is not contiguous"
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            return f"{name} has a gradient hook"
    return None


def _layer(policy: ActorCritic) -> str | None:
    chains = ("trunk", "actor_head", "actor", "critic_head", "critic")
    for name in chains:
        if layers_of(getattr(policy, name)) is None:
            return f"{name} is not a chain of Linear layers with tanh or relu"
    # A parameter that is shared, or sits in an encoder, would get no gradient, or only a part of it.
    modules = [policy.core, *(getattr(policy, name) for name in chains)]
    reached = [p for module in modules for p in module.parameters()] + list(policy.parameters(recurse=False))
    if sorted(map(id, reached)) != sorted(map(id, policy.parameters())):
        encoders = (policy.encoder, policy.critic_encoder)
        if any(True for part in encoders if part is not None for _ in part.parameters()):
            return "the encoder has weights of its own, as that of images"
        return "layers share weights"
    return None


def _core(policy: ActorCritic) -> str | None:
    if not native_kernel.in_use():
        return f"the compiled CPU kernel is not in use ({native_kernel.status()['reason']})"
    parts = cores_by_head(policy.core)
    if isinstance(policy.core, Parallel) and (policy.core.inputs or set(parts) != {"actor", "critic"}):
        return f"the core is a Parallel of {', '.join(parts)}{' with inputs' if policy.core.inputs else ''}"
    x = torch.empty(1, policy.core.input_size)
    for part in parts.values():
        if type(part) is Memoryless:
            continue
        if type(part) not in (LSTM, GRU) or dispatch.kernel_name(part, x) != "native":  # type: ignore[arg-type]
            inside = f"a Block of {type(part.core).__name__}" if isinstance(part, Block) else type(part).__name__
            return f"the update in C knows LSTM and GRU on the compiled kernel, and the core is {inside}"
    return None


def native_step_obstacle(policy: RecurrentPolicy) -> str | None:
    """Why this policy's step cannot run in C; None if it can."""
    reason = native_obstacle(policy)
    if reason is not None:
        return reason
    if type(policy).act is not ActorCritic.act or "act" in vars(policy):
        return f"{type(policy).__name__} overrides act"
    if any(isinstance(core, GatedCore) and core.num_layers > 1 for core in cores_by_head(policy.core).values()):
        return "the core has several layers"
    return None
