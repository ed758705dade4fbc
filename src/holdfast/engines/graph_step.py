"""The policy's step of a rollout as one CUDA graph, for environments that cannot be captured.

Between two steps of the environment there is one launch, or two where a truncated episode needs the value of its last
observation. Whether one does is read from the device one step late, so that the device never waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.engines.cuda_graph import capturing, copy_into, read_later, rehearsal, side_stream
from holdfast.policies.action_parts import has_parts
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy, autocast
from holdfast.policies.heads import draw_action
from holdfast.rollout.collector import Acted, Acting
from holdfast.spans import span
from holdfast.state import State, tree_map


def obstacle(policy: RecurrentPolicy) -> str | None:
    """Why this policy's step cannot be captured; None if it can."""
    if not isinstance(policy, ActorCritic):
        return f"{type(policy).__name__} is not an hf.ActorCritic"
    if has_parts(policy.action_space):
        return "an action has several parts (Dict, Tuple)"
    return None


class StepGraphActing(Acting):
    """As `Acting`, for all environments at once. Captures at the first rollout; `NotCapturable` if the policy waits for the GPU.

    `state` holds the states of all environments during a rollout.
    """

    _act_graph: torch.cuda.CUDAGraph | None = None

    def begin(self, adapter: Any, steps: int) -> None:
        super().begin(adapter, steps)
        state, _ = self.memory.take(adapter.num_envs)
        adapter.takes_every_final_obs = True
        if self._act_graph is None:
            self._capture(adapter, state)
        copy_into(self._state, state)
        if self.noise is not None:
            self._noise.copy_(self.noise.value)
        self._undecided: tuple[int, Any, State, Callable[[], list[float]]] | None = None

    def state(self, rows: Tensor | None) -> State:
        return state_ops.clone(self._state)

    def act(self, obs: Any, resets: Tensor, mask: Any, rows: Tensor | None) -> Acted:
        copy_into((self._obs, self._resets), (obs, resets))
        assert self._act_graph is not None
        with span("policy (one CUDA graph)"):
            self._act_graph.replay()
            return Acted(*(part.clone() for part in self._step))

    def value(self, obs: Any, resets: Tensor | None, rows: Tensor | None = None) -> Tensor:
        with span("values for bootstrapping"):
            self._decide()
            return self._value_from(obs, resets, self._state)

    def add_final(self, t: int, final_obs: Any, truncated: Tensor) -> None:
        """Called after step t of the environment was launched: the flag of the step before is on the host by then, or soon."""
        with span("values for bootstrapping"):
            self._decide()
            if self._in_place:
                self._finals[t] = self._value_from(final_obs, None, self._state)
                return
            any_truncated = read_later(truncated.any().view(1))
            self._undecided = t, final_obs, state_ops.clone(self._state), any_truncated

    def finish(self) -> None:
        self.memory.put(state_ops.clone(self._state), None)
        if self.noise is not None:
            self.noise.value = self._noise.clone()

    def _decide(self) -> None:
        """About the last step that was added."""
        if self._undecided is None:
            return
        t, final_obs, state, any_truncated = self._undecided
        self._undecided = None
        if any(any_truncated()):
            self._finals[t] = self._value_from(final_obs, None, state)

    def _value_from(self, obs: Any, resets: Tensor | None, state: State) -> Tensor:
        """V(obs) [B] from a state, which stays: the present one, or if the core does not update in place any."""
        copy_into(self._last_obs, obs)
        if not self._in_place:
            copy_into(self._last_state, state)
        self._last_resets.zero_() if resets is None else self._last_resets.copy_(resets)
        self._value_graph.replay()
        return self._last_value.clone()

    # --- what is captured --------------------------------------------------------------------------------------------

    def _capture(self, adapter: Any, state: State) -> None:
        self._make_room(adapter, state)
        generator = torch.cuda.get_rng_state()
        try:
            with side_stream():
                for checked in (nullcontext, rehearsal):  # the first one may compile
                    with checked():
                        self._act(), self._value()
        finally:
            torch.cuda.set_rng_state(generator)
        self._value_graph, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capturing(graph):
            self._step = self._act()
        with capturing(self._value_graph):
            self._last_value = self._value()
        self._act_graph = graph

    def _make_room(self, adapter: Any, state: State) -> None:
        """Tensors that the graphs read and write."""
        self._in_place = self.policy.core.supports_advance  # a state too large to copy in every step
        self._state = tree_map(torch.clone, state)
        self._last_state = self._state if self._in_place else tree_map(torch.clone, state)
        self._obs, self._resets = tree_map(torch.clone, adapter.obs), adapter.resets.clone()
        self._last_obs, self._last_resets = tree_map(torch.clone, adapter.obs), adapter.resets.clone()
        self._noise = torch.zeros(()) if self.noise is None else self.noise.value.clone()

    @torch.no_grad()
    def _act(self) -> tuple[Tensor, Tensor, Tensor]:
        with autocast(self.device, self.autocast):
            dist, value, state = self.policy.step(self._obs, self._state, self._resets, in_place=self._in_place)
            if self.noise is not None:
                self._noise.copy_(self.noise.draw(self._noise, self._resets))
            action = draw_action(dist, None if self.noise is None else self._noise)
            log_prob = dist.log_prob(action).float()
        if not self._in_place:
            copy_into(self._state, state)
        return action, log_prob, value.float()

    @torch.no_grad()
    def _value(self) -> Tensor:
        with autocast(self.device, self.autocast):
            return self.policy.step(self._last_obs, self._last_state, self._last_resets).value.float()
