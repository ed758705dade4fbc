"""`Segment`: T steps of B environments, time first, with the state they started from. `Recording` puts one together.

Nothing here plays. Usually a turn of a recording is one step of all environments. Environments that answer in batches take turns
of some of them, each at a step of its own; every environment has the same number of steps in the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.state import State, map_tensors, tree_map

Targets = Callable[["Segment"], tuple[Tensor, Tensor]]
_STEPS, _NUMBERS = {"per": "step"}, {"per": "step", "numbers": True}
"""Marks of fields: [T, B, ...]; exactly [T, B]."""
_INPUTS_OF_TARGETS = ("rewards", "terminated", "truncated", "valid", "value")


class _Seen:
    """A tensor as it is now: equal to itself until it is changed in place."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.version = tensor, tensor._version if isinstance(tensor, Tensor) else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self.tensor is other.tensor and self.version == other.version


class Later:
    """A value that is read or computed when it is first asked for."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute


class _MayComeLater:
    """A field whose value may be a `Later`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, segment: Any, owner: type | None = None) -> Any:
        if segment is None:
            return ()  # the default
        value = segment.__dict__[self.name]
        if isinstance(value, Later):
            value = segment.__dict__[self.name] = value.compute()
        return value

    def __set__(self, segment: Any, value: Any) -> None:
        segment.__dict__[self.name] = value


class _Target:
    """A field that `Segment.targets` computes, again if what it was computed from has changed since; an assigned one stays."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.index = name, ("advantage", "returns").index(name)

    def __get__(self, segment: Any, owner: type | None = None) -> Any:
        if segment is None:
            return None  # the default
        assigned = segment.__dict__[self.name]
        return assigned if assigned is not None or segment.targets is None else segment.compute_targets()[self.index]

    def __set__(self, segment: Any, value: Any) -> None:
        segment.__dict__[self.name] = value


@dataclass
class Segment:
    """T steps of B environments, time first: what was played, and what a rollout was asked to record besides.

    `valid` is False where a step only played an environment's reset. `advantage` and `returns` are assigned, or computed by
    `targets` when they are first asked for.
    """

    obs: Any = field(metadata=_STEPS)  # [T, B, ...]
    actions: Any = field(metadata=_STEPS)  # [T, B, ...]; of a Dict or Tuple action space nested as the space
    resets: Tensor = field(metadata=_NUMBERS)  # [T, B] bool
    rewards: Tensor = field(metadata=_NUMBERS)  # [T, B]
    terminated: Tensor = field(metadata=_NUMBERS)  # [T, B] bool
    truncated: Tensor = field(metadata=_NUMBERS)  # [T, B] bool
    valid: Tensor = field(metadata=_NUMBERS)  # [T, B] bool
    start_state: State  # leaves [B, ...]: before step 0 and before its resets
    action_mask: Any = field(default=None, metadata=_STEPS)  # [T, B, ...] bool
    log_prob: Any = field(default=None, metadata=_NUMBERS)  # [T, B]
    value: Any = field(default=None, metadata=_NUMBERS)  # [T, B]
    params: Any = field(default=None, metadata=_STEPS)  # [T, B, ...]: what the distributions were made from
    final_obs: Any = field(default=None, metadata=_STEPS)  # [T, B, ...]: zeros where no episode was truncated
    final_value: Any = field(
        default=None, metadata=_NUMBERS
    )  # [T, B]: V(final observation) where truncated; None: nowhere
    failed: Any = field(default=None, metadata=_NUMBERS)  # [T, B]: the environments were rebuilt; None: nowhere
    last_value: Any = None  # [B]: after the last step
    end_state: State = None  # leaves [B, ...]: after the last step, if somebody asked for it
    index: Any = None  # [B]: which sequences of a buffer these are
    advantage: Any = _Target()
    returns: Any = _Target()
    chunk_states: list[State] = field(default_factory=list)  # before each training chunk; the first is start_state
    episode_returns: Sequence[float] = _MayComeLater()  # type: ignore[assignment]
    episode_lengths: Sequence[int] = _MayComeLater()  # type: ignore[assignment]
    seconds: dict[str, float] = field(default_factory=dict)
    targets: Targets | None = None
    """Gives advantages and returns [T, B]."""

    @property
    def num_steps(self) -> int:
        return self.resets.shape[0]

    @property
    def num_envs(self) -> int:
        return self.resets.shape[1]

    def __setattr__(self, name: str, value: Any) -> None:
        """Rejects shapes that a loss would silently broadcast."""
        if (
            name in _PER_STEP
            and isinstance(value, Tensor)
            and "resets" in vars(self)
            and value.shape != self.resets.shape
        ):
            raise ValueError(
                f"{name} of a segment has shape {tuple(value.shape)}, expected [T, B] = {list(self.resets.shape)}, as its resets"
            )
        super().__setattr__(name, value)

    @property
    def all_valid(self) -> bool:
        """Whether it is known, without a look at the device, that every step is valid."""
        return vars(self).get("_known_valid") == _Seen(self.valid)

    def mark_all_valid(self) -> Segment:
        """Say that every step is valid, as long as `valid` stays what it is. Returns itself."""
        vars(self)["_known_valid"] = _Seen(self.valid)
        return self

    @torch.no_grad()
    def compute_targets(self) -> tuple[Tensor, Tensor]:
        """Advantages and returns by `targets`; computed once, as long as nothing they depend on changes."""
        assert self.targets is not None
        inputs = [_Seen(getattr(self, name)) for name in _INPUTS_OF_TARGETS]
        if vars(self).get("_targets_of") != inputs:
            vars(self)["_computed"], vars(self)["_targets_of"] = self.targets(self), inputs
        return vars(self)["_computed"]

    # --- cutting -----------------------------------------------------------------------------------------------------

    def changed(self, **parts: Any) -> Segment:
        """The same segment with other parts. Nothing is read or computed for it."""
        other = object.__new__(Segment)
        vars(other).update({**vars(self), **parts})
        return other

    def _cut(self, **parts: Any) -> Segment:
        """`changed` by parts that hold some of the same steps."""
        other = self.changed(**parts)
        return other.mark_all_valid() if self.all_valid else other

    def map_steps(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Everything that is [T, B, ...], changed."""
        present = {name: getattr(self, name) for name in PER_STEP}
        return {name: tree_map(change, part) for name, part in present.items() if part is not None}

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
        return self._cut(**self.map_steps(cut), start_state=start, chunk_states=[start])

    def columns(self, length: int | None = None) -> Segment:
        """Deprecated name of `as_sequences`."""
        warnings.warn("Segment.columns is now Segment.as_sequences", DeprecationWarning, stacklevel=2)
        return self.as_sequences(length)

    def select(self, columns: Tensor) -> Segment:
        """Some environments (columns) only."""
        steps = self.map_steps(lambda x: x.index_select(1, columns))
        start = state_ops.select(self.start_state, columns)
        index = None if self.index is None else self.index.index_select(0, columns)
        return self._cut(**steps, start_state=start, chunk_states=[start], index=index)

    def steps(self, begin: int, end: int) -> Segment:
        """The steps from `begin` up to `end`; `start_state` stays that of step 0."""
        return self._cut(**self.map_steps(lambda x: x[begin:end]))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Segment:
        """The same segment with every tensor changed. Episodes that were not read yet stay so."""
        parts = {name: map_tensors(change, part) for name, part in vars(self).items() if name in _TENSORS}
        return self._cut(**parts)

    def to(self, device: torch.device | str) -> Segment:
        """A copy on another device."""
        return self.map_tensors(lambda x: x.to(device))


PER_STEP = (*(f.name for f in fields(Segment) if f.metadata.get("per") == "step"), "advantage", "returns")
"""The fields that are [T, B, ...]."""
_PER_STEP = {f.name for f in fields(Segment) if f.metadata.get("numbers")} | {"advantage", "returns"}
_TENSORS = {*PER_STEP, "start_state", "chunk_states", "last_value", "index"}


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
