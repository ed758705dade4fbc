"""PPO's minibatches on a CPU without autograd: each part of an `ActorCritic` forward, then backward, in C.

In a thin minibatch (one environment's 128 steps through 64 units) autograd's records, module calls and small operations
take as long as the arithmetic (docs/cpu.md). The numbers are those of `ppo_terms` and `backward()`, to rounding.
`native_obstacles.py` says for which policies; every other one goes through autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.algorithms.ppo import LossSettings, PPOTerms
from holdfast.cores import Core, Parallel
from holdfast.cores.gated import GatedCore
from holdfast.engines.minibatch import Minibatches
from holdfast.engines.objective import fused_objective
from holdfast.engines.ranks import RankGradients
from holdfast.kernels.cpu import recurrence as native
from holdfast.kernels.cpu.adam import NativeAdam
from holdfast.kernels.cpu.objective import StoredSteps, clipped
from holdfast.kernels.cpu.perceptron import Perceptron, layers_of
from holdfast.kernels.operands import Gradients, Needed
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy, merge_time, segment_shape
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State


class NativeMinibatches(Minibatches):
    """Gradients, clipping and Adam in C; ranks average gradients in between. Rebuilt for every update: modules may change."""

    def __init__(self, policy: RecurrentPolicy, *args: Any, **options: Any) -> None:
        super().__init__(policy, *args, **options)
        assert isinstance(policy, ActorCritic)
        self._policy = policy
        self._adam = NativeAdam.try_create(self.optimizer, self.parameters)
        self._rank_gradients = RankGradients(self.parameters, self.ranks) if self.ranks.joined else None

    def load(self, batch: Segment, settings: LossSettings) -> None:
        super().load(batch, settings)
        self._gradient = NativeGradient(self._policy, settings)

    def gradients(self, part: Segment, share: Any) -> PPOTerms:
        with span("forward and backward (without autograd)"):
            terms = self._gradient(part, self.all_valid)
        if self._rank_gradients is not None:
            with span("averaging gradients over ranks"):
                self._rank_gradients.average(share)
        return terms

    def optimizer_step(self) -> Tensor:
        if self._adam is None:  # before the first step of the run there are no moments to work on
            return super().optimizer_step()
        return torch.tensor(self._adam.step(self.config.max_grad_norm))


class _Layers:
    """Linear layers, one after another. Identity when empty."""

    def __init__(self, *modules: nn.Module) -> None:
        layers = [layer for module in modules for layer in layers_of(module) or []]
        self.perceptron = Perceptron(layers) if layers else None
        self.parameters = [p for linear, _ in layers for p in (linear.weight, linear.bias)]

    def forward(self, x: Tensor) -> Tensor:
        self._x, self._outputs = x, self.perceptron.forward(x) if self.perceptron else [x]
        return self._outputs[-1]

    def backward(self, d: Tensor, need_dx: bool) -> Tensor | None:
        return self.perceptron.backward(d, self._x, self._outputs, need_dx) if self.perceptron else d


class _Recurrence:
    """The layers of an LSTM or a GRU; identity for a `Memoryless`."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.parameters = list(core.parameters())
        self._gradients: dict[Any, Gradients] = {}  # by layer and shape; overwritten by the next minibatch

    def forward(self, x: Tensor, state: State, resets: Tensor | None) -> Tensor:
        core = self.core
        self._kept: list[native.Kept] = []
        if not isinstance(core, GatedCore):
            return x
        for layer in range(core.num_layers):
            h, c = state["h"][:, layer], state["c"][:, layer] if "c" in state else None
            masked, weights = core.kernel_resets(layer, resets), core.weights(layer, x.dtype)
            y, _, _, gates, cells = native.run_forward(x, h, c, masked, weights, keep=True)
            self._kept.append(native.Kept(x, h, c, masked, weights, y, gates, cells))
            x = y
        return x

    def backward(self, dy: Tensor, need_dx: bool) -> Tensor | None:
        core = self.core
        if not isinstance(core, GatedCore):
            return dy
        d: Tensor | None = dy
        learned, has_c = core.reset == "learned", "c" in core.leaf_names
        by_layer: list[Gradients] = []  # first layer first
        for layer in reversed(range(core.num_layers)):
            key = (layer, dy.shape)
            needed = Needed(
                x=need_dx or layer > 0, h0=False, c0=False, reset_h=learned, reset_c=learned and has_c,
                w_ih=True, w_hh=True, b_ih=core.bias, b_hh=core.bias,
            )  # fmt: skip
            gradients = native.run_backward(d, None, None, self._kept[layer], needed, into=self._gradients.get(key))
            self._gradients[key] = gradients
            by_layer.insert(0, gradients)
            for name, grad in zip(core.parameter_names(layer), gradients[5:]):
                getattr(core, name).grad = grad
            d = gradients.x
        for leaf in core.leaf_names if learned else ():
            getattr(core, f"initial_{leaf}").grad = torch.stack([getattr(g, f"reset_{leaf}") for g in by_layer])
        return d


class NativeGradient:
    """`NativeGradient(policy, settings)(segment, all_valid)` leaves gradients in the policy's parameters."""

    def __init__(self, policy: ActorCritic, settings: LossSettings) -> None:
        self.policy, self.settings = policy, settings
        core = policy.core
        self.trunk = _Layers(policy.trunk)
        self.cores = {name: _Recurrence(part) for name, part in cores_by_head(core).items()}
        self.actor = _Layers(policy.actor_head, policy.actor)
        self.critic = _Layers(policy.critic_head, policy.critic)

    @torch.no_grad()
    def __call__(self, segment: Segment, all_valid: bool) -> PPOTerms:
        policy, resets = self.policy, segment.resets
        T, B = segment_shape(segment.obs)
        encoded = policy.encoder(merge_time(segment.obs, T, B, "observations")).to(torch.float32)
        x = self.trunk.forward(encoded).unflatten(0, (T, B))
        state = segment.start_state
        policy.core.check_state(state, B)
        outputs = {
            name: part.forward(x, state if name == "" else state[name], resets).flatten(0, 1)
            for name, part in self.cores.items()
        }
        for_actor, for_critic = (outputs[name if name in outputs else ""] for name in ("actor", "critic"))
        logits, value = self.actor.forward(for_actor), self.critic.forward(for_critic)
        d_logits, d_value, terms = self._objective(logits, value, segment, all_valid)

        reaches_trunk = self.trunk.perceptron is not None
        d_actor = self.actor.backward(d_logits, self._needs_gradient("actor"))
        d_critic = self.critic.backward(d_value.unsqueeze(1), self._needs_gradient("critic"))
        into = {"": _sum(d_actor, d_critic)} if "" in self.cores else {"actor": d_actor, "critic": d_critic}
        arriving = None
        for name, part in self.cores.items():
            d = into[name]
            if d is not None:
                arriving = _sum(arriving, part.backward(d.unflatten(0, (T, B)), reaches_trunk))
        if reaches_trunk and arriving is not None:
            self.trunk.backward(arriving.flatten(0, 1), False)
        return terms

    def _needs_gradient(self, head: str) -> bool:
        """Whether there is anything to train below this head."""
        part = self.cores.get(head) or self.cores[""]
        return bool(part.parameters) or self.trunk.perceptron is not None

    def _objective(
        self, logits: Tensor, value: Tensor, segment: Segment, all_valid: bool
    ) -> tuple[Tensor, Tensor, PPOTerms]:
        """The gradients of logits [N, A] and values [N], and the terms of the loss."""
        space = self.policy.action_space
        if not isinstance(space, spaces.Discrete) or segment.action_mask is not None:
            return self._objective_of_any(logits, value, segment, all_valid)
        chosen = segment.actions if space.start == 0 else segment.actions - int(space.start)
        valid = None if all_valid else segment.valid
        old = StoredSteps(segment.log_prob, segment.value, segment.advantage, segment.returns, valid)
        d_logits, d_value, terms = clipped(logits, chosen.long(), value, old, self.settings)
        return d_logits, d_value.flatten(), PPOTerms(*terms.unbind())

    def _objective_of_any(
        self, logits: Tensor, value: Tensor, segment: Segment, all_valid: bool
    ) -> tuple[Tensor, Tensor, PPOTerms]:
        """For any distribution: autograd from the loss to the outputs of the heads."""
        T, B = segment.resets.shape
        mask = None if segment.action_mask is None else merge_time(segment.action_mask, T, B, "an action mask")
        if hasattr(self.policy, "log_std"):
            self.policy.log_std.grad = None
        with torch.enable_grad():
            logits, value = logits.requires_grad_(), value.flatten().requires_grad_()
            dist = self.policy.distribution(logits, mask)
            log_prob, entropy = dist.log_prob(merge_time(segment.actions, T, B, "actions")), dist.entropy()
            new = (log_prob.view(T, B), entropy.view(T, B), value.view(T, B))
            terms = fused_objective(*new, segment, self.settings, all_valid)
            # 1 + 0 * loss: a loss that is not finite makes its gradients so.
            (terms.loss * (1 + 0 * terms.loss.detach())).backward()
        assert logits.grad is not None and value.grad is not None
        return logits.grad, value.grad, PPOTerms(*(term.detach() for term in terms))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def cores_by_head(core: Core) -> dict[str, Core]:
    """The cores by the name of the head that reads them; "" is read by both."""
    return dict(core.cores.items()) if isinstance(core, Parallel) else {"": core}  # type: ignore[arg-type]
