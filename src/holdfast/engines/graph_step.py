"""Rollouts step by step with the policy's whole step as one CUDA graph, for environments that cannot be captured.

Between two steps of the environment there is one launch, or two where a truncated episode needs the value of its last
observation. Whether one does is read from the device one step late, so that the device never waits for the host. It computes
what `Collector` computes.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.engines.cuda_graph import NotCapturable, capturing, copy_into, rehearsal, side_stream
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.heads import draw_action
from holdfast.policies.precision import autocast
from holdfast.rollout.collector import Collector
from holdfast.rollout.exploration import CorrelatedNoise
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State, tree_map

_ROWS = ("obs", "resets", "valid", "actions", "log_prob", "value", "rewards", "terminated", "truncated")


def obstacle(policy: RecurrentPolicy) -> str | None:
    """Why this policy's step cannot be captured; None if it can."""
    if not isinstance(policy, ActorCritic):
        return f"{type(policy).__name__} is not an hf.ActorCritic"
    return None


class StepGraphCollector(Collector):
    """As `Collector`, which plays the rollout itself where the environment masks actions or the policy waits for the GPU."""

    _graphs: _StepGraphs | None = None

    def _rollout(self) -> Segment:
        if not self.started:
            self.start()
        adapter, clock = self.adapter, time.perf_counter
        if self._graphs is None and adapter.action_mask is None and self.slowed_by is None:
            try:
                self._graphs = _StepGraphs(self)
            except NotCapturable as reason:
                self.slowed_by = str(reason)
        adapter.takes_every_final_obs = self._graphs is not None and adapter.action_mask is None
        if not adapter.takes_every_final_obs:
            return super()._rollout()
        assert self._graphs is not None
        graphs, failed = self._graphs, []
        rows: dict[str, list[Any]] = {name: [] for name in _ROWS}
        chunk_states: list[State] = []
        finals = _FinalValues(graphs, self.steps)
        in_env, began = 0.0, clock()
        graphs.load(self.memory.take(adapter.num_envs)[0], self.noise)
        for t in range(self.steps):
            if t % self.bptt == 0:
                chunk_states.append(state_ops.clone(graphs.state))
            with span("policy (one CUDA graph)"):
                action, log_prob, value = graphs.act(adapter.obs, adapter.resets)
            present = adapter.obs, adapter.resets, adapter.valid
            before = clock()
            with span("environment"):
                out = adapter.step(action)
            in_env += clock() - before
            parts = (*present, action, log_prob, value, out.rewards, out.terminated, out.truncated)
            for name, part in zip(_ROWS, parts):
                rows[name].append(part)
            if out.failed:
                failed.append(t)
            if out.final_obs is not None:
                with span("values for bootstrapping"):
                    finals.add(t, out.final_obs, out.truncated)
        with span("values for bootstrapping"):
            finals.finish()
            last = graphs.value(adapter.obs, adapter.resets, graphs.state)
        self.memory.put(state_ops.clone(graphs.state), None)
        if self.noise is not None:
            self.noise.value = graphs.noise.clone()
        stacked = {name: tree_map(lambda *x: torch.stack(x), *parts) for name, parts in rows.items()}
        segment = self._finish(stacked, last, finals.values, chunk_states, failed)
        segment.seconds = {"env": in_env, "policy": clock() - began - in_env}
        return segment


class _StepGraphs:
    """A step and a value of the collector's policy, captured; `NotCapturable` if it waits for the GPU. `state` and `noise` are
    those of all environments; `load` them before the first step of a rollout."""

    def __init__(self, collector: StepGraphCollector) -> None:
        adapter, self._policy = collector.adapter, collector.policy
        self._device, self._autocast = adapter.device, collector.autocast
        self.state = tree_map(torch.clone, collector.memory.take(adapter.num_envs)[0])
        self.in_place = collector.policy.core.supports_advance  # a state too large to copy in every step
        self._last_state = self.state if self.in_place else tree_map(torch.clone, self.state)
        self._obs, self._resets = tree_map(torch.clone, adapter.obs), adapter.resets.clone()
        self._last_obs, self._last_resets = tree_map(torch.clone, adapter.obs), adapter.resets.clone()
        self._correlated = collector.noise
        self.noise = torch.zeros(()) if collector.noise is None else collector.noise.value.clone()
        generator = torch.cuda.get_rng_state()
        try:
            with side_stream():
                for checked in (nullcontext, rehearsal):  # the first one may compile
                    with checked():
                        self._act(), self._value()
        finally:
            torch.cuda.set_rng_state(generator)
        self._act_graph, self._value_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capturing(self._act_graph):
            self._step = self._act()
        with capturing(self._value_graph):
            self._last_value = self._value()

    def load(self, state: State, noise: CorrelatedNoise | None) -> None:
        """Continue from this memory and this exploration noise."""
        copy_into(self.state, state)
        if noise is not None:
            self.noise.copy_(noise.value)

    def act(self, obs: Any, resets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Action, log-probability, value; `state` and `noise` move on."""
        copy_into((self._obs, self._resets), (obs, resets))
        self._act_graph.replay()
        action, log_prob, value = (part.clone() for part in self._step)
        return action, log_prob, value

    def value(self, obs: Any, resets: Tensor | None, state: State) -> Tensor:
        """V(obs) [B] from a state, which stays: the present one, or with `in_place` False any. resets None: no row starts over."""
        copy_into(self._last_obs, obs)
        if not self.in_place:
            copy_into(self._last_state, state)
        self._last_resets.zero_() if resets is None else self._last_resets.copy_(resets)
        self._value_graph.replay()
        return self._last_value.clone()

    @torch.no_grad()
    def _act(self) -> tuple[Tensor, Tensor, Tensor]:
        policy = self._policy
        with autocast(self._device, self._autocast):
            dist, value, state = policy.step(self._obs, self.state, self._resets, in_place=self.in_place)
            if self._correlated is None:
                action = dist.sample()
            else:
                self.noise.copy_(self._correlated.draw(self.noise, self._resets))
                action = draw_action(dist, self.noise)
            log_prob = dist.log_prob(action).float()
        if not self.in_place:
            copy_into(self.state, state)
        return action, log_prob, value.float()

    @torch.no_grad()
    def _value(self) -> Tensor:
        with autocast(self._device, self._autocast):
            return self._policy.step(self._last_obs, self._last_state, self._last_resets).value.float()


class _FinalValues:
    """V(final observation) [B] of the steps of a rollout in which an episode was truncated, by step."""

    def __init__(self, graphs: _StepGraphs, steps: int) -> None:
        self._graphs, self.values = graphs, dict[int, Tensor]()
        self._any_truncated = torch.zeros(steps, dtype=torch.bool, pin_memory=True)
        self._undecided: tuple[int, Any, State, torch.cuda.Event] | None = None

    def add(self, t: int, final_obs: Any, truncated: Tensor) -> None:
        """Called after step t of the environment was launched: the flag of the step before is on the host by then, or soon."""
        self.finish()
        if self._graphs.in_place:
            self.values[t] = self._graphs.value(final_obs, None, self._graphs.state)
            return
        self._any_truncated[t].copy_(truncated.any(), non_blocking=True)
        on_host = torch.cuda.Event()
        on_host.record(torch.cuda.current_stream(truncated.device))
        self._undecided = t, final_obs, state_ops.clone(self._graphs.state), on_host

    def finish(self) -> None:
        """Decide about the last step that was added."""
        if self._undecided is None:
            return
        t, final_obs, state, on_host = self._undecided
        self._undecided = None
        on_host.synchronize()
        if self._any_truncated[t]:
            self.values[t] = self._graphs.value(final_obs, None, state)
