"""The first and last layers of an `hf.ActorCritic` as single launches on a GPU, around any core.

    obs -> encoder and trunk (1 launch) -> core -> actor, critic, sampling or PPO's loss (1 launch)

`policies/actor_critic.py` says what is computed; the kernels are `kernels/triton/first_layer.py` and `outputs.py`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.checks import is_debug
from holdfast.cores import Parallel
from holdfast.engines.autograd import first_hook, overridden_method
from holdfast.policies.action_parts import has_parts, num_outputs
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.encoders import Composite, OneHot, Vector
from holdfast.state import State, tree_map

# A tile of rows and the layers stay in the shared memory of a multiprocessor.
LARGEST_FEATURES, LARGEST_OUTPUTS = 256, 127  # of the core; of the actor: with the critic's a row in registers
LARGEST_FIRST_LAYER = 64, 128  # inputs, features
LARGEST_OF_TWO_PARTS = 32  # inputs, where two parts of an observation are read


def obstacle(policy: RecurrentPolicy, precision: str) -> str | None:
    """Why the layers around the core cannot be single launches; None if they can."""
    if precision != "fp32":
        return f"the precision is {precision}"
    if not isinstance(policy, ActorCritic):
        return f"{type(policy).__name__} is not an hf.ActorCritic"
    if is_debug() or torch.is_anomaly_enabled():
        return "debugging is on"
    reason = overridden_method(policy) or first_hook(policy) or _parameters(policy) or _outputs(policy)
    if reason is None and importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed"
    if reason is None and not policy.actor.weight.is_cuda:
        reason = "the policy is not on a GPU"
    return reason


def _parameters(policy: ActorCritic) -> str | None:
    for name, p in policy.named_parameters():
        if p.dtype != torch.float32 or not p.is_contiguous() or not p.requires_grad:
            return f"{name} is not a contiguous, trainable float32 tensor"
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            return f"{name} has a gradient hook"
    return None


def _outputs(policy: ActorCritic) -> str | None:
    if isinstance(policy.core, Parallel):
        return "actor and critic have cores of their own"
    if len(policy.actor_head) or len(policy.critic_head):  # type: ignore[arg-type]
        return "there are layers between the core and the outputs"
    if type(policy.actor) is not nn.Linear or type(policy.critic) is not nn.Linear:
        return "actor or critic is not a plain Linear layer"
    if has_parts(policy.action_space):
        return "an action has several parts (Dict, Tuple)"
    if policy.squash_actions:
        return "actions are squashed"
    if policy.scale_actions and policy.action_center.dtype == torch.float64:
        return "the bounds of actions are far from 0, so actions are float64"
    if policy.core.output_size > LARGEST_FEATURES:
        return f"the core has more than {LARGEST_FEATURES} outputs"
    outputs = num_outputs(policy.action_space)
    if outputs > LARGEST_OUTPUTS:
        return f"the actor has more than {LARGEST_OUTPUTS} outputs"
    return None


class FusedPolicy:
    """The layers of a policy that has no `obstacle`. Weights are read where they are, so it stays valid as they change."""

    def __init__(self, policy: ActorCritic) -> None:
        from holdfast.kernels.triton import first_layer, outputs  # imports Triton

        self.policy, self._outputs = policy, outputs
        self.layers = _layers(policy, outputs.Layers)
        self._first = _first_layer(policy, first_layer)

    # --- training ---------------------------------------------------------------------------------------------------

    def features(self, obs: Any, columns: Tensor) -> Tensor:
        """What the core reads, [T, columns, I], of a rollout's observations [T, B, ...]; differentiable."""
        parts = None if self._first is None else _readable_parts(self.policy.encoder, obs)
        if parts is None:
            rows = tree_map(lambda o: o.index_select(1, columns).flatten(0, 1), obs)
            return self.policy.encode(rows).view(-1, columns.numel(), self.policy.core.input_size)
        weight, bias = _first_linear(self.policy)
        return _FirstLayer.apply(self._first, columns, weight, bias, *parts)  # type: ignore[no-untyped-call]

    # --- a step of a rollout ----------------------------------------------------------------------------------------

    def step_features(self, obs: Any) -> Tensor:
        """What the core reads, [B, I]. No gradients."""
        parts = None if self._first is None else _readable_parts(self.policy.encoder, obs)
        if parts is None:
            return self.policy.encode(obs)
        weight, bias = _first_linear(self.policy)
        return self._first.features([part.unsqueeze(0) for part in parts], None, weight, bias).squeeze(0)

    def outputs(self, y: Tensor, noise: Tensor, action: Tensor, log_prob: Tensor, value: Tensor, joined: Any) -> None:
        """Draw actions from features y [B, F]. They, their log-probabilities and the values go into the next three. joined:
        `self.layers.joined()`, for all steps of a rollout."""
        scale = self.policy.value_scale
        statistics = None if scale is None else (scale.mean, scale.std)
        self._outputs.act(y, self.layers, noise, statistics, action, log_prob, value, joined)

    def noise(self, *shape: int, device: torch.device) -> Tensor:
        """Random numbers to sample with, [*shape, outputs]."""
        noise = torch.empty(*shape, self.layers.actor_w.shape[0], device=device)
        if self.layers.kind == "categorical":
            return noise.exponential_()
        return noise.uniform_() if self.layers.kind == "bernoulli" else noise.normal_()

    def empty_actions(self, *shape: int, device: torch.device) -> Tensor:
        """Room for actions."""
        dtype = {"categorical": torch.int64, "bernoulli": torch.int8, "gaussian": torch.float32}[self.layers.kind]
        return torch.empty(*shape, *(self.policy.action_space.shape or ()), dtype=dtype, device=device)


class FusedSteps:
    """The policy's part of one rollout: random numbers of all steps at once, results written where they stay.

    drawn: noise for Box actions comes with each step.
    """

    def __init__(self, fused: FusedPolicy, steps: int, resets: Tensor, drawn: bool) -> None:
        batch, device = len(resets), resets.device
        self._fused = fused
        self._noise = None if drawn else fused.noise(steps, batch, device=device)
        self._any_noise = torch.ones(batch, fused.layers.actor_w.shape[0], device=device)
        self._actions = fused.empty_actions(steps, batch, device=device)
        self._log_prob = torch.empty(steps, batch, device=device)
        self._values = torch.empty(steps, batch, device=device)
        self._unused = fused.empty_actions(batch, device=device), torch.empty(batch, device=device)
        self._joined = fused.layers.joined()

    def act(
        self, t: int, obs: Any, state: State, resets: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        """Step t: action, log-probability, value, new state."""
        core, x = self._fused.policy.core, self._fused.step_features(obs)
        if core.supports_advance:
            y = core.advance_(x, state, resets)
        else:
            y, state = core(x, state, resets)
        row = self._actions[t], self._log_prob[t], self._values[t]
        self._fused.outputs(y, noise if self._noise is None else self._noise[t], *row, self._joined)
        return (*row, state)

    def value(self, obs: Any, state: State, resets: Tensor | None) -> Tensor:
        """V(obs) [B] with this state, which stays."""
        (y,) = self._fused.policy.core.output_unchecked(self._fused.step_features(obs), state, resets)
        value = torch.empty_like(self._unused[1])
        self._fused.outputs(y, self._any_noise, *self._unused, value, self._joined)
        return value

    def written(self) -> dict[str, Tensor]:
        """What all steps wrote, [T, B, ...]."""
        return {"actions": self._actions, "log_prob": self._log_prob, "value": self._values}


class _FirstLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Any, columns: Tensor, weight: Tensor, bias: Tensor, *obs: Tensor) -> Tensor:
        ctx.first = first
        ctx.save_for_backward(columns, weight, bias, *obs)
        return first.features(obs, columns, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_features: Tensor) -> tuple[Tensor | None, ...]:
        columns, weight, bias, *obs = ctx.saved_tensors
        d_weight, d_bias = ctx.first.gradients(obs, columns, weight, bias, d_features.contiguous())
        return None, None, d_weight, d_bias, *(None for _ in obs)


def _layers(policy: ActorCritic, make: Any) -> Any:
    space, device = policy.action_space, policy.core.device()
    own: dict[str, Any] = {}
    if isinstance(space, spaces.MultiBinary):
        own = {"kind": "bernoulli"}
    elif isinstance(space, spaces.Box):
        own = {"kind": "gaussian", "log_std": policy.log_std}
        if policy.scale_actions:
            own |= {"center": policy.action_center, "half_range": policy.action_half_range}
    else:
        sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else [int(n) for n in space.nvec]  # type: ignore[attr-defined]
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        own = {"bounds": torch.tensor(ends, dtype=torch.int32, device=device)}
        own["start"] = int(space.start) if isinstance(space, spaces.Discrete) else 0
    return make(policy.actor.weight, policy.actor.bias, policy.critic.weight, policy.critic.bias, **own)


def _first_linear(policy: ActorCritic) -> tuple[Tensor, Tensor]:
    linear = policy.trunk[0]  # type: ignore[index]
    return linear.weight, linear.bias


def _encoders(encoder: Any) -> list[Any]:
    """An encoder's parts in the order of their inputs, if it has some."""
    return list(encoder.parts) if type(encoder) is Composite else [encoder]


def _first_layer(policy: ActorCritic, kernels: Any) -> Any:
    """The kernel's description of encoder and trunk; None if they are more than it knows."""
    encoders, trunk = _encoders(policy.encoder), list(policy.trunk.children())
    if len(trunk) != 2 or type(trunk[0]) is not nn.Linear or type(trunk[1]) not in (nn.Tanh, nn.ReLU):
        return None
    features, inputs = trunk[0].weight.shape
    if inputs > LARGEST_FIRST_LAYER[0] or features > LARGEST_FIRST_LAYER[1]:
        return None
    if len(encoders) > 2 or any(type(encoder) not in (OneHot, Vector) for encoder in encoders):
        return None
    if len(encoders) == 2 and inputs > LARGEST_OF_TWO_PARTS:
        return None
    parts = tuple(_part(encoder, kernels.Part) for encoder in encoders)
    return kernels.FirstLayer(parts, "tanh" if isinstance(trunk[1], nn.Tanh) else "relu")


def _part(encoder: OneHot | Vector, make: Any) -> Any:
    if isinstance(encoder, Vector):
        statistics = {"shift": encoder.shift, "scale": encoder.scale} if encoder.normalize else {}
        return make(encoder.size, encoder.size, **statistics)
    return make(encoder.size, len(encoder.nvec), encoder.head, encoder.value)


def _readable_parts(encoder: Any, obs: Any) -> list[Tensor] | None:
    """The tensors of an observation, one for each part of the encoder; None if the kernel cannot read one of them."""
    parts = [obs[key] for key in encoder.keys] if type(encoder) is Composite else [obs]
    return parts if all(map(_readable, _encoders(encoder), parts)) else None


def _readable(encoder: Any, obs: Any) -> bool:
    """Whether the kernel can read these observations."""
    if not isinstance(obs, Tensor) or not obs.is_contiguous():
        return False
    if isinstance(encoder, OneHot):
        return not obs.is_floating_point() and obs.dtype != torch.bool
    return obs.dtype == torch.float32
