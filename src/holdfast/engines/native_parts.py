"""What the passes in C over an `ActorCritic` are made of: prepared calls of its parts, and the batches that they read.

Everything stays where it is: a pass reads what its inputs hold when it runs, and writes where the next one reads. A few calls of
torch select a minibatch of a batch of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.cores import Core, Parallel
from holdfast.cores.gated import GatedCore
from holdfast.kernels.cpu import recurrence as native
from holdfast.kernels.cpu.update import Perceptron, layers_of
from holdfast.kernels.gated_operator import Kept
from holdfast.kernels.operands import Gradients, Resets
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy, Step, merge_time, segment_shape
from holdfast.policies.heads import draw_action
from holdfast.rollout.segment import Segment
from holdfast.state import State, tree_map

Passes = list[Callable[[], object]]
GradientOf = Mapping[Tensor, Tensor]
"""Where the gradient of each parameter goes."""


def cores_by_head(core: Core) -> dict[str, Core]:
    """The cores by the name of the head that reads them; "" is read by both."""
    return dict(core.cores.items()) if isinstance(core, Parallel) else {"": core}  # type: ignore[arg-type]


class LayerPasses:
    """Linear layers, one after another; identity where there are none. x [N, I] -> out [N, O]."""

    def __init__(self, x: Tensor, passes: Passes, *modules: nn.Module) -> None:
        layers = [layer for module in modules for layer in layers_of(module) or []]
        self.parameters = [p for linear, _ in layers for p in (linear.weight, linear.bias)]
        self._prepared = Perceptron(layers, x) if layers else None
        self.out = x
        if self._prepared is not None:
            self.out = self._prepared.out
            passes.append(self._prepared.forward)

    def backward(self, d_out: Tensor, gradient_of: GradientOf, need_dx: bool, passes: Passes) -> Tensor | None:
        """Where the gradient of x will be, if needed."""
        if self._prepared is None:
            return d_out
        dx = self._prepared.prepare_backward(d_out, [gradient_of[p] for p in self.parameters], need_dx)
        passes.append(self._prepared.backward)
        return dx


class CorePasses:
    """The layers of an LSTM or a GRU; identity for a `Memoryless`. x [T, B, I] -> out [T, B, O]."""

    def __init__(self, core: Core, x: Tensor, state: Tensor | None, resets: Tensor, passes: Passes) -> None:
        self.core, self.out = core, x
        self._kept: list[Kept] = []
        if not isinstance(core, GatedCore):
            return
        assert state is not None  # [leaves, layers, B, H]
        for layer in range(core.num_layers):
            h, *c = state[:, layer].unbind()
            masked, weights = core.kernel_resets(layer, resets), core.weights(layer, x.dtype)
            kept, call = native.prepare_forward(self.out, h, c[0] if c else None, masked, weights)
            passes.append(call)
            self._kept.append(kept)
            self.out = kept.y

    def backward(self, d_out: Tensor, gradient_of: GradientOf, need_dx: bool, passes: Passes) -> Tensor | None:
        """Where the gradient of x will be, if needed."""
        core, d = self.core, d_out
        if not isinstance(core, GatedCore):
            return d
        for layer in reversed(range(core.num_layers)):
            kept = self._kept[layer]
            dx = torch.empty_like(kept.x) if need_dx or layer > 0 else None
            learned = [gradient_of[getattr(core, f"initial_{leaf}")][layer] for leaf in _learned(core)]
            reset_h, reset_c = [*learned, None, None][:2]
            of_weights = [gradient_of[getattr(core, name)] for name in core.parameter_names(layer)]
            w_ih, w_hh, b_ih, b_hh = [*of_weights, None, None][:4]
            gradients = Gradients(dx, None, None, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh)
            passes.append(native.prepare_backward(d, kept, gradients))
            if dx is not None:
                d = dx
        return d if need_dx else None


def _learned(core: GatedCore) -> tuple[str, ...]:
    return core.leaf_names if core.reset == "learned" else ()


def sum_of(a: Tensor | None, b: Tensor | None, passes: Passes) -> Tensor | None:
    """Where the sum will be; None counts as 0."""
    if a is None or b is None:
        return b if a is None else a
    out = torch.empty_like(a)
    passes.append(lambda: torch.add(a, b, out=out))
    return out


ENCODED_AT_ONCE = 2**26
"""Observations with more encoded numbers than this (256 MB) are encoded minibatch by minibatch."""


@dataclass
class NativeBatch:
    """T steps of B sequences."""

    encoded: Tensor  # [T, B, E]
    obs: Any  # [T, B, ...] if a selection has to be encoded; None if `encoded` holds all
    stored: Tensor  # [4, T, B]: log-probabilities, values, advantages, returns
    resets: Tensor  # [T, B]
    actions: Any  # [T, B, ...]; where the objective is C's too, [T, B] int64, from 0
    valid: Tensor | None  # [T, B]; None: every step counts
    action_mask: Any  # [T, B, ...] or None
    states: dict[str, Tensor]  # by core [leaves, layers, B, H]

    @classmethod
    def of(cls, policy: ActorCritic, segment: Segment) -> NativeBatch:
        policy.core.check_state(segment.start_state, segment.num_envs)
        stored = (segment.log_prob, segment.value, segment.advantage, segment.returns)
        encoded = encode(policy, tree_map(lambda o: o[:, :1], segment.obs))
        at_once = encoded.numel() * segment.num_envs <= ENCODED_AT_ONCE
        return cls(
            encoded=encode(policy, segment.obs) if at_once else encoded,
            obs=None if at_once else segment.obs,
            stored=torch.stack([part.float() for part in stored]),
            resets=segment.resets.contiguous(),
            actions=_actions(policy, segment),
            valid=None if segment.all_valid else segment.valid.contiguous(),
            action_mask=segment.action_mask,
            states=_states(policy, segment),
        )

    log_prob = property(lambda self: self.stored[0])
    value = property(lambda self: self.stored[1])
    advantage = property(lambda self: self.stored[2])
    returns = property(lambda self: self.stored[3])

    def everything(self, policy: ActorCritic) -> NativeBatch:
        """All sequences, as a selection of them is."""
        return self if self.obs is None else replace(self, encoded=encode(policy, self.obs), obs=None)

    def new_selection(self, size: int) -> NativeBatch:
        """Room for so many of the sequences."""

        def room(x: Tensor, dim: int) -> Tensor:
            return x.new_empty([size if d == dim else n for d, n in enumerate(x.shape)])

        return NativeBatch(
            encoded=room(self.encoded, 1),
            obs=None,
            stored=room(self.stored, 2),
            resets=room(self.resets, 1),
            actions=tree_map(lambda a: room(a, 1), self.actions),
            valid=None if self.valid is None else room(self.valid, 1),
            action_mask=self.action_mask,
            states={name: room(state, 2) for name, state in self.states.items()},
        )

    def select_into(self, policy: ActorCritic, columns: Tensor, out: NativeBatch) -> None:
        """Write some sequences into a selection of as many."""
        if self.obs is None:
            torch.index_select(self.encoded, 1, columns, out=out.encoded)
        else:
            out.encoded.copy_(encode(policy, tree_map(lambda o: o.index_select(1, columns), self.obs)))
        torch.index_select(self.stored, 2, columns, out=out.stored)
        torch.index_select(self.resets, 1, columns, out=out.resets)
        tree_map(lambda a, into: torch.index_select(a, 1, columns, out=into), self.actions, out.actions)
        if self.valid is not None and out.valid is not None:
            torch.index_select(self.valid, 1, columns, out=out.valid)
        if self.action_mask is not None:
            out.action_mask = tree_map(lambda m: m.index_select(1, columns), self.action_mask)
        for name, state in self.states.items():
            torch.index_select(state, 2, columns, out=out.states[name])


def encode(policy: ActorCritic, obs: Any) -> Tensor:
    """[T, B, E], contiguous. Nothing is trained here, and statistics do not move during an update."""
    T, B = segment_shape(obs)
    return policy.encoder(merge_time(obs, T, B, "observations")).to(torch.float32).unflatten(0, (T, B)).contiguous()


def _states(policy: ActorCritic, segment: Segment) -> dict[str, Tensor]:
    found = {}
    for name, core in cores_by_head(policy.core).items():
        if isinstance(core, GatedCore):
            state = segment.start_state if name == "" else segment.start_state[name]
            found[name] = torch.stack([state[leaf].float().transpose(0, 1) for leaf in core.leaf_names])
    return found


def objective_in_c(policy: ActorCritic, action_mask: Any) -> bool:
    """Whether the objective has a function in C: choices without masks."""
    return isinstance(policy.action_space, spaces.Discrete) and action_mask is None


def _actions(policy: ActorCritic, segment: Segment) -> Any:
    if not objective_in_c(policy, segment.action_mask):
        return tree_map(Tensor.contiguous, segment.actions)
    return (segment.actions.long() - int(policy.action_space.start)).contiguous()  # type: ignore[attr-defined]


class NativeSteps:
    """Steps of B environments. All tensors that C reads and writes stay where they are; what is returned is new."""

    @torch.no_grad()
    def __init__(self, policy: RecurrentPolicy, num_envs: int) -> None:
        assert isinstance(policy, ActorCritic)
        self._policy, self._passes = policy, Passes()
        self._encoded = torch.empty(num_envs, policy.encoder.size)  # type: ignore[call-overload]
        self._resets = torch.zeros(num_envs, dtype=torch.bool)
        x = LayerPasses(self._encoded, self._passes, policy.trunk).out
        self._cores = {
            name: _CoreStep(core, x, self._resets, self._passes) for name, core in cores_by_head(policy.core).items()
        }
        read_by = {head: self._cores.get(head) or self._cores[""] for head in ("actor", "critic")}
        self._logits = LayerPasses(read_by["actor"].out, self._passes, policy.actor_head, policy.actor).out
        self._value = LayerPasses(read_by["critic"].out, self._passes, policy.critic_head, policy.critic).out

    def act(self, obs: Any, state: State, resets: Tensor, mask: Any, noise: Tensor | None) -> tuple[Step, State]:
        """What `policy.act` returns, and the state afterwards."""
        value = self.value(obs, state, resets)
        dist = self._policy.distribution(self._logits, mask)
        action = draw_action(dist, noise)
        step = Step(action, dist.log_prob(action), value)
        states = {name: core.state() for name, core in self._cores.items()}
        return step, states.get("", states)

    def value(self, obs: Any, state: State, resets: Tensor | None) -> Tensor:
        """V(obs) [B] from a state, which stays. resets None: no row starts over."""
        policy = self._policy
        self._encoded.copy_(policy.encoder(obs))
        self._resets.zero_() if resets is None else self._resets.copy_(resets)
        for name, core in self._cores.items():
            core.load(state if name == "" else state[name])
        for call in self._passes:
            call()
        value = self._value.flatten()
        return value.clone() if policy.value_scale is None else policy.value_scale.to_reward_units(value)


class _CoreStep:
    """A step of an LSTM or a GRU of one layer; identity for a `Memoryless`. x [B, I] -> out [B, O]."""

    def __init__(self, core: Core, x: Tensor, resets: Tensor, passes: Passes) -> None:
        self.out = x
        self._names: tuple[str, ...] = ()
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self._passed_on: State = None
        if not isinstance(core, GatedCore):
            return
        self._names = core.leaf_names
        before, after = ([x.new_empty(len(x), core.hidden_size) for _ in self._names] for _ in range(2))
        # Without gradients a reset that only detaches changes nothing.
        masked = Resets() if core.reset == "detach" else core.kernel_resets(0, resets)
        h, c = [*before, None][:2]
        new_h, new_c = [*after, None][:2]
        assert h is not None and new_h is not None
        passes.append(native.prepare_step(x, h, c, masked, core.weights(0, x.dtype), new_h, new_c))
        self.out, self._before, self._after = new_h, before, after

    def load(self, state: State) -> None:
        """Start from this state, leaves [B, 1, H]."""
        self._passed_on = state
        for name, tensor in zip(self._names, self._before):
            tensor.copy_(state[name].squeeze(1))

    def state(self) -> State:
        """After the step, in tensors of its own."""
        if not self._names:
            return self._passed_on
        return {name: tensor.clone().unsqueeze(1) for name, tensor in zip(self._names, self._after)}
