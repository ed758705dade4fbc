"""The gradient of PPO's loss on a CPU without autograd: each part of an `ActorCritic` forward, then backward, in C.

In a thin minibatch (one environment's 128 steps through 64 units) autograd's records, module calls and small operations
take as long as the arithmetic (docs/cpu.md). The numbers are those of `ppo_terms` and `backward()`, to rounding.
`NativeGradient.of` says for which policies; every other one goes through autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from holdfast.checks import is_debug
from holdfast.config import TrainConfig
from holdfast.cores import GRU, LSTM, Core, Memoryless, Parallel
from holdfast.cores.gated import GatedCore
from holdfast.engines.objective import ClippedObjective
from holdfast.kernels import dispatch
from holdfast.kernels.cpu import recurrence as native
from holdfast.kernels.cpu.objective import clipped
from holdfast.kernels.cpu.perceptron import Perceptron, layers_of
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import merge_time, segment_shape
from holdfast.rollout.segment import Segment
from holdfast.state import State

_OWN_METHODS = (
    "encode",
    "decode",
    "step",
    "unroll",
    "evaluate",
    "forward",
    "_encode",
    "_decode",
    "distribution",
    "_parts",
    "__call__",
)


class _Layers:
    """Linear layers; with none of them what comes in goes out."""

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
    """The layers of an LSTM or a GRU, or none of a `Memoryless`."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.parameters = list(core.parameters())
        self._gradients: dict[Any, tuple[Tensor, ...]] = {}  # by layer and shape; overwritten by the next minibatch

    def forward(self, x: Tensor, state: State, resets: Tensor | None) -> Tensor:
        core = self.core
        self._kept: list[tuple[Tensor | None, ...]] = []
        if not isinstance(core, GatedCore):
            return x
        for layer in range(core.num_layers):
            mask, fills = core._reset_arguments(layer, resets)
            h, c = (state[leaf][:, layer] if leaf in state else None for leaf in ("h", "c"))
            inputs = (x, h, c, mask, fills[0], fills[-1] if c is not None else None, *core._weights(layer, x.dtype))
            y, _, _, gates, cells = native.run_forward(*inputs, core.reset == "detach", True)
            self._kept.append((*inputs[:8], y, gates, cells))
            x = y
        return x

    def backward(self, dy: Tensor, need_dx: bool) -> Tensor | None:
        core = self.core
        if not isinstance(core, GatedCore):
            return dy
        d: Tensor | None = dy
        starts: dict[str, list[Tensor]] = {leaf: [] for leaf in core.leaf_names}
        for layer in reversed(range(core.num_layers)):
            dx_here, learned, two = need_dx or layer > 0, core.reset == "learned", len(core.leaf_names) == 2
            need = [dx_here, False, False, learned, learned and two, True, True, core.bias, core.bias]
            kept, key = self._kept[layer], (layer, dy.shape)
            grads = native.run_backward(
                d, None, None, *kept, core.reset == "detach", need, into=self._gradients.get(key)
            )
            self._gradients[key] = grads
            for leaf, fill in zip(core.leaf_names, grads[3:5]):
                starts[leaf].insert(0, fill)
            for name, grad in zip(core._names[layer], grads[5:]):
                getattr(core, name).grad = grad
            d = grads[0] if dx_here else None
        if core.reset == "learned":
            for leaf, rows in starts.items():
                getattr(core, f"initial_{leaf}").grad = torch.stack(rows)
        return d


class NativeGradient:
    """`NativeGradient(policy, config)(segment, all_valid)` leaves gradients in the policy's parameters; terms as `ppo_terms`'."""

    def __init__(self, policy: ActorCritic, config: TrainConfig) -> None:
        self.policy, self.config = policy, config
        core = policy.core
        self.trunk = _Layers(policy.trunk)
        self.cores = {name: _Recurrence(part) for name, part in _parts_of(core).items()}  # type: ignore[arg-type]
        self.actor = _Layers(policy.actor_head, policy.actor)
        self.critic = _Layers(policy.critic_head, policy.critic)

    @staticmethod
    def of(policy: nn.Module, config: TrainConfig) -> NativeGradient | None:
        """For policies whose gradients can be had here, where nobody would miss autograd's."""
        return NativeGradient(policy, config) if isinstance(policy, ActorCritic) and _fits(policy) else None

    @torch.no_grad()
    def __call__(self, segment: Segment, all_valid: bool) -> tuple[Tensor, ...]:
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
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The gradients of logits [N, A] and values [N], and the terms."""
        config, space = self.config, self.policy.action_space
        stored = (segment.log_prob, segment.value, segment.advantage, segment.returns)
        valid = None if all_valid else segment.valid
        options = (config.clip_range, config.clip_value, config.entropy_coef, config.value_coef)
        if isinstance(space, spaces.Discrete) and segment.action_mask is None:
            chosen = segment.actions if space.start == 0 else segment.actions - int(space.start)
            d_logits, d_value, terms = clipped(logits, chosen.long(), value, *stored, valid, *options)
            return d_logits, d_value.flatten(), terms.unbind()
        return self._objective_of_any(logits, value, segment, (*stored, valid), options)

    def _objective_of_any(
        self, logits: Tensor, value: Tensor, segment: Segment, stored: tuple[Any, ...], options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """For any distribution: autograd from the loss to what the heads gave."""
        T, B = segment.resets.shape
        mask = None if segment.action_mask is None else merge_time(segment.action_mask, T, B, "an action mask")
        if hasattr(self.policy, "log_std"):
            self.policy.log_std.grad = None
        with torch.enable_grad():
            logits, value = logits.requires_grad_(), value.flatten().requires_grad_()
            dist = self.policy.distribution(logits, mask)
            log_prob, entropy = dist.log_prob(merge_time(segment.actions, T, B, "actions")), dist.entropy()
            new = (log_prob.view(T, B), entropy.view(T, B), value.view(T, B))
            terms = ClippedObjective.apply(*new, *stored, *options)  # type: ignore[no-untyped-call]
            # 1 + 0 * loss: a loss that is not finite makes its gradients so.
            (terms[0] * (1 + 0 * terms[0].detach())).backward()
        assert logits.grad is not None and value.grad is not None
        return logits.grad, value.grad, tuple([term.detach() for term in terms])


def _fits(policy: ActorCritic) -> bool:
    if is_debug() or torch.is_anomaly_enabled() or _has_any_global_hook():
        return False
    if any(getattr(type(policy), name) is not getattr(ActorCritic, name) for name in _OWN_METHODS):
        return False
    if any(name in vars(policy) for name in _OWN_METHODS) or any(map(_has_hooks, policy.modules())):
        return False
    parameters = list(policy.parameters())
    if any(p.dtype != torch.float32 or not p.is_cpu or not p.requires_grad or _is_watched(p) for p in parameters):
        return False
    chains = (policy.trunk, policy.actor_head, policy.actor, policy.critic_head, policy.critic)
    if any(layers_of(chain) is None for chain in chains) or not _runs_here(policy):
        return False
    return _reaches_each_once(policy, parameters)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _parts_of(core: Core) -> dict[str, nn.Module]:
    """The cores by the name of the head that reads them; "" is read by both."""
    return dict(core.cores.items()) if isinstance(core, Parallel) else {"": core}


def _runs_here(policy: ActorCritic) -> bool:
    """Whether every core is one whose passes are here, and the heads read them as they are."""
    parts = _parts_of(policy.core)
    if isinstance(policy.core, Parallel) and (policy.core.inputs or set(parts) != {"actor", "critic"}):
        return False
    x = torch.empty(1, policy.core.input_size)
    return native.in_use() and all(
        type(part) is Memoryless or (type(part) in (LSTM, GRU) and dispatch.choose("", part, x) is native)  # type: ignore[arg-type]
        for part in parts.values()
    )


def _reaches_each_once(policy: ActorCritic, parameters: list[nn.Parameter]) -> bool:
    """Whether each of `parameters` is trained here once: one that is shared, or sits in an encoder, needs autograd."""
    modules = (policy.trunk, policy.core, policy.actor_head, policy.actor, policy.critic_head, policy.critic)
    reached = [p for module in modules for p in module.parameters()] + [p for p in policy.parameters(recurse=False)]
    return sorted(map(id, reached)) == sorted(map(id, parameters))


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _is_watched(parameter: nn.Parameter) -> bool:
    """Whether somebody has hooked into this parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
