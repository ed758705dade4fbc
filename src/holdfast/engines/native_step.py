"""Rollouts on a CPU with the policy's step in C: trunk, core and heads as prepared calls, without modules and checks.

Between two steps of small environments most of the policy's time is Python. Encoder and distribution are the policy's own; the
numbers are those of `policy.step`, to rounding. For the policies that `obstacles.py` allows, with one layer of memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.cores import Core
from holdfast.cores.gated import GatedCore
from holdfast.engines.native_passes import LayerPasses, Passes, cores_by_head
from holdfast.engines.obstacles import native_obstacle
from holdfast.kernels.cpu import recurrence as native
from holdfast.kernels.operands import Resets
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy, Step
from holdfast.policies.heads import draw_action
from holdfast.rollout.acting import Acted, Acting
from holdfast.state import State


def obstacle(policy: RecurrentPolicy) -> str | None:
    """Why this policy's step cannot run in C; None if it can."""
    reason = native_obstacle(policy)
    if reason is not None:
        return reason
    if type(policy).act is not ActorCritic.act or "act" in vars(policy):
        return f"{type(policy).__name__} overrides act"
    if any(isinstance(core, GatedCore) and core.num_layers > 1 for core in cores_by_head(policy.core).values()):
        return "the core has several layers"
    return None


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

    def finish(self) -> None:
        self._steps = None


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
        policy = self._policy
        self._encoded.copy_(policy.encoder(obs))
        self._resets.copy_(resets)
        for name, core in self._cores.items():
            core.load(state if name == "" else state[name])
        for call in self._passes:
            call()
        value = self._value.flatten()
        value = value.clone() if policy.value_scale is None else policy.value_scale.to_reward_units(value)
        dist = policy.distribution(self._logits, mask)
        action = draw_action(dist, noise)
        step = Step(action, dist.log_prob(action), value)
        states = {name: core.state() for name, core in self._cores.items()}
        return step, states.get("", states)


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
