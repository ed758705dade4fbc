"""The policy's part of a rollout: act, give the state to keep, value what follows. Engines write faster forms of it.

`Acting` does it by `policy.act` and `policy.peek_value`, for every policy. It does not touch the environment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.memory import Memory
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.precision import autocast
from holdfast.rollout.exploration import Noise
from holdfast.spans import span
from holdfast.state import State, tree_map


class Acted(NamedTuple):
    """A step of the policy, each [B, ...]. params: what the distribution is made from, if it is recorded."""

    action: Tensor
    log_prob: Tensor
    value: Any
    params: Any = None


class Acting:
    """Steps of a policy with a memory. A rollout calls `begin`, then for each step `state` where a chunk begins, `act`, and
    `add_final` where episodes were truncated, then `finish`."""

    def __init__(
        self,
        policy: RecurrentPolicy,
        memory: Memory,
        noise: Noise | None = None,
        autocast: torch.dtype | None = None,
        records: frozenset[str] = frozenset(),
    ) -> None:
        self.policy, self.memory, self.noise, self.autocast, self.records = policy, memory, noise, autocast, records
        self.device = policy.core.device()
        self._finals: dict[int, Tensor] = {}

    def begin(self, adapter: Any, steps: int) -> None:
        """Before a rollout: weights may have changed or moved. adapter: what the policy sees first."""
        self._finals = {}
        adapter.takes_every_final_obs = False

    def state(self, rows: Tensor | None) -> State:
        """The states before the next step, which nobody changes later. rows: of these environments; None: of all."""
        if rows is not None or self.memory.in_place:
            return self.memory.read(rows)
        return self.memory.take(self.memory.num_envs)[0]

    def act(self, obs: Any, resets: Tensor, mask: Any, rows: Tensor | None) -> Acted:
        """One step of the environments in `rows`, None: of all; memory and noise move on."""
        drawn = None if self.noise is None else self.noise.advance(resets, rows)
        options: dict[str, Any] = {} if drawn is None else {"noise": drawn}
        with autocast(self.device, self.autocast):
            if "params" in self.records:
                step, dist = self.policy.act_and_decode(obs, resets, rows, self.memory, mask, drawn)
                return Acted(*step, dist.params)
            return Acted(*self.policy.act(obs, resets, rows, memory=self.memory, action_mask=mask, **options))

    def value(self, obs: Any, resets: Tensor | None, rows: Tensor | None = None) -> Tensor:
        """V(obs) with the present state, which stays as it is."""
        with span("values for bootstrapping"), autocast(self.device, self.autocast):
            return self.policy.peek_value(obs, rows, resets=resets, memory=self.memory).float()

    def add_final(self, t: int, final_obs: Any, truncated: Tensor) -> None:
        """After step t: V(final observation) of the truncated episodes, from the state they had before the reset."""
        rows = truncated.nonzero().squeeze(1)
        values = self.value(tree_map(lambda o: o.index_select(0, rows), final_obs), None, rows)
        self._finals[t] = torch.zeros(len(truncated), device=truncated.device).index_copy(0, rows, values)

    def final_values(self, like: Tensor) -> Tensor | None:
        """V(final observation) [T, B] where episodes were truncated; None if none was."""
        if not self._finals:
            return None
        values = torch.zeros_like(like, dtype=torch.float32)
        for t, final in self._finals.items():
            values[t] = final
        return values

    def finish(self) -> None:
        """After a rollout: the memory holds the states that follow it."""
