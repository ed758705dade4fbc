"""`Segment`: T steps of B environments, time first, with the state they started from. It holds and cuts, it does not play."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.state import State, tree_map


@dataclass
class Segment:
    """T steps of B environments, time first. `valid` is False where a step only played an environment's reset."""

    obs: Any  # [T, B, ...]
    actions: Tensor  # [T, B, ...]
    resets: Tensor  # [T, B] bool
    rewards: Tensor  # [T, B]
    log_prob: Tensor  # [T, B]
    value: Tensor  # [T, B]
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    advantage: Tensor  # [T, B]
    returns: Tensor  # [T, B]
    valid: Tensor  # [T, B] bool
    start_state: State  # leaves [B, ...]: before step 0 and before its resets
    action_mask: Any = None  # [T, B, ...] bool
    chunk_states: list[State] = field(default_factory=list)  # before each training chunk; the first is start_state
    episode_returns: list[float] = field(default_factory=list)
    episode_lengths: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return self.resets.shape[0]

    @property
    def num_envs(self) -> int:
        return self.resets.shape[1]

    TIMED: ClassVar = ("obs", "actions", "resets", "rewards", "log_prob", "value", "terminated", "truncated", "advantage",
             "returns", "valid", "action_mask")  # fmt: skip
    """The fields that are [T, B, ...]."""
    PER_STEP: ClassVar = frozenset(
        {"rewards", "log_prob", "value", "terminated", "truncated", "advantage", "returns", "valid"}
    )
    """The fields with one number per step, as `resets`."""

    def __setattr__(self, name: str, value: Any) -> None:
        """A loss would broadcast an advantage [B], and give a number."""
        if name in self.PER_STEP and isinstance(value, Tensor) and value.shape != self.resets.shape:
            raise ValueError(
                f"{name} of a segment has shape {tuple(value.shape)}, expected [T, B] = {list(self.resets.shape)}, as its resets"
            )
        super().__setattr__(name, value)

    def _timed(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Everything that is [T, B, ...], changed."""
        present = [name for name in self.TIMED if getattr(self, name) is not None]
        return {name: tree_map(change, getattr(self, name)) for name in present}

    def as_sequences(self, length: int | None = None) -> Segment:
        """The same steps as training sequences: [length, K*B, ...], one column per chunk and environment::

        t →  0 1 2 3 | 4 5 6 7                0 1 2 3
        env0 a a a a | b b b b      →   (0,0) a a a a
        env1 c c c c | d d d d          (0,1) c c c c
                                        (1,0) b b b b
                                        (1,1) d d d d
        """
        length = length or self.num_steps
        chunks = self.num_steps // length
        if chunks == 1:
            return self
        if length * chunks != self.num_steps or len(self.chunk_states) != chunks:
            raise ValueError(
                f"this segment has {self.num_steps} steps and {len(self.chunk_states)} start states; it cannot be cut "
                f"into chunks of {length}. Collect it with bptt={length}"
            )

        def cut(x: Tensor) -> Tensor:
            return x.unflatten(0, (chunks, length)).transpose(0, 1).flatten(1, 2)

        start = tree_map(lambda *s: torch.cat(s), *self.chunk_states)
        return replace(self, **self._timed(cut), start_state=start, chunk_states=[start])

    def columns(self, length: int | None = None) -> Segment:
        """Deprecated name of `as_sequences`."""
        warnings.warn("Segment.columns is now Segment.as_sequences", DeprecationWarning, stacklevel=2)
        return self.as_sequences(length)

    def select(self, columns: Tensor) -> Segment:
        """Some environments (columns) only."""
        timed = self._timed(lambda x: x.index_select(1, columns))
        start = state_ops.select(self.start_state, columns)
        return replace(self, **timed, start_state=start, chunk_states=[start])

    def steps(self, begin: int, end: int) -> Segment:
        """The steps from `begin` up to `end`; `start_state` stays that of step 0."""
        return replace(self, **self._timed(lambda x: x[begin:end]))

    def to(self, device: torch.device | str) -> Segment:
        """A copy on another device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in (*self.TIMED, "start_state", "chunk_states"):
            if moved[name] is not None:
                moved[name] = tree_map(lambda x: x.to(device), moved[name])
        return Segment(**moved)
