"""`Recording`: the steps of a rollout as they come, put together as [T, B, ...] at the end.

Usually a turn is one step of all environments. Environments that answer in batches take turns of some of them, each at a step
of its own; every environment has the same number of steps in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.state import State, tree_map


class Turn(NamedTuple):
    """Which environments act, and at which step of the rollout. rows None: all, at step `t`."""

    t: Any  # an int, or [n] for the environments in rows
    rows: Tensor | None = None  # [n]


class Recording:
    """What `num_envs` environments saw, did and got in `steps` steps; a state is kept every `bptt` steps."""

    def __init__(self, steps: int, num_envs: int, bptt: int) -> None:
        self.steps, self.num_envs, self.bptt = steps, num_envs, bptt
        self._parts: dict[str, list[Any]] = {}
        self._places: dict[str, list[Tensor]] = {}  # of the rows of each part, as t * num_envs + row; none: in order
        self._states: list[State] = []
        self._state_places: list[Tensor] = []
        self._finals: dict[int, Any] = {}

    def keep_state(self, turn: Turn, read: Callable[[Tensor | None], State]) -> None:
        """Where a training chunk begins."""
        if turn.rows is None:
            if turn.t % self.bptt == 0:
                self._states.append(read(None))
            return
        begins = turn.t % self.bptt == 0
        if bool(begins.any()):
            rows = turn.rows[begins]
            self._states.append(read(rows))
            self._state_places.append(turn.t[begins] // self.bptt * self.num_envs + rows)

    def add(self, turn: Turn, **parts: Any) -> None:
        """Parts of a turn, each [B, ...] or [n, ...]."""
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part)
            if turn.rows is not None:
                self._places.setdefault(name, []).append(turn.t * self.num_envs + turn.rows)

    def add_final(self, t: int, final_obs: Any, truncated: Tensor) -> None:
        """The last observations of the episodes that step t truncated."""

        def kept(final: Tensor) -> Tensor:
            return torch.where(truncated.view(-1, *(1,) * (final.dim() - 1)), final, torch.zeros_like(final))

        self._finals[t] = tree_map(kept, final_obs)

    def finished(self) -> dict[str, Any]:
        """Every part [T, B, ...]; None for parts that never came."""
        found = {name: self._together(name, parts) for name, parts in self._parts.items()}
        if self._finals:
            none = tree_map(torch.zeros_like, next(iter(self._finals.values())))
            finals = [self._finals.get(t, none) for t in range(self.steps)]
            found["final_obs"] = tree_map(lambda *x: torch.stack(x), *finals)
        return found

    def chunk_states(self) -> list[State]:
        """The states at the beginning of each chunk, leaves [B, ...]."""
        if not self._state_places:
            return self._states
        order = torch.cat(self._state_places).argsort()
        together = tree_map(lambda *s: torch.cat(s).index_select(0, order.to(s[0].device)), *self._states)
        chunks = self.steps // self.bptt
        return [
            tree_map(lambda s, i=i: s[i * self.num_envs : (i + 1) * self.num_envs], together) for i in range(chunks)
        ]

    def _together(self, name: str, parts: list[Any]) -> Any:
        parts = _filled(parts)
        if parts[0] is None:
            return None
        if name not in self._places:
            return tree_map(lambda *x: torch.stack(x), *parts)
        order = torch.cat(self._places[name]).argsort()
        shape = (self.steps, self.num_envs)
        return tree_map(lambda *x: torch.cat(x).index_select(0, order.to(x[0].device)).unflatten(0, shape), *parts)


def _filled(parts: list[Any]) -> list[Any]:
    """Action masks may be missing in some steps, which then allow everything."""
    if all(part is not None for part in parts):
        return parts
    known = next((part for part in parts if part is not None), None)
    return parts if known is None else [torch.ones_like(known) if part is None else part for part in parts]
