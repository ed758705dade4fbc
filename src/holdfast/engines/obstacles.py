"""What keeps a policy from running in C or in fused kernels: checked before every rollout and update, because hooks come and go."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from holdfast.checks import is_debug
from holdfast.cores import GRU, LSTM, Block, Memoryless, Parallel
from holdfast.engines.native_passes import cores_by_head
from holdfast.kernels import dispatch
from holdfast.kernels.cpu import recurrence as native
from holdfast.kernels.cpu.perceptron import layers_of
from holdfast.policies.actor_critic import ActorCritic

# An ActorCritic that changes one of these computes something else than the C passes do.
_FIXED_METHODS = (
    "encode", "decode", "step", "unroll", "evaluate", "forward", "_encode", "_decode", "distribution", "_parts", "__call__",
)  # fmt: skip


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
    if not native.in_use():
        return f"the compiled CPU kernel is not in use ({native.status()['reason']})"
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
