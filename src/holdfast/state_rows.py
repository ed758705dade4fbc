"""`StateRows`: the states of a core in rows 0..count-1. `id_index.py` knows whose row is which.

A fresh row (new, or reset) is a mark, not numbers: reading it gives the core's current initial state, so a learned start is
never stale. Tensors that a caller may hold are replaced, not updated. Nothing here waits for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.checks import values_are_readable
from holdfast.cores.base import Core
from holdfast.state import State


class StateRows:
    """Rows of state and their fresh marks, on the core's device and in its dtype."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.state: State = None  # leaves [rows, ...]
        self.fresh: Tensor = torch.empty(0, dtype=torch.bool)  # [rows]
        self._any_fresh = False
        self._handed_out = False  # a caller may hold the stored tensors: replace them, do not update them
        self._with_room: tuple[Tensor, State] | None = None  # larger tensors that begin with `fresh` and `state`
        self._placement: Any = None  # the core's dtype and device when the state was last moved there

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.fresh.shape[0]

    def follow_core(self) -> None:
        """Move to the core's device and dtype, if they changed."""
        placement = self.core.dtype_and_device()
        if placement == self._placement:
            return
        if self.state is None:
            self.state = state_ops.detach(self.core.initial_state(0))
        else:
            self.state = state_ops.convert(self.state, self.core.row_shapes(), *placement)
        self.fresh, self._with_room, self._placement = self.fresh.to(placement[1]), None, placement

    # --- reading ---------------------------------------------------------------------------------------------------

    def initial(self, count: int) -> State:
        """The core's current initial state for `count` rows, without a graph."""
        return state_ops.without_graph(self.core.initial_state(count))

    def read_all(self) -> State:
        """All rows; this may be the stored tensors themselves."""
        if torch.compiler.is_compiling() or self._any_fresh:
            return state_ops.where(self.fresh, self.initial(self.count), self.state)
        self._handed_out = True
        return self.state

    def read(self, rows: Tensor) -> State:
        """A copy of these rows; those that do not exist are fresh. Rows whose numbers may not be read must exist."""
        missing = values_are_readable(rows) and len(rows) > 0 and int(rows.max()) >= self.count
        rows = rows.to(self.fresh.device)
        if missing:
            fresh = self.initial(len(rows))
            if self.count == 0:
                return state_ops.clone(fresh)
            exist = rows < self.count
            inside = torch.where(exist, rows, 0)
            return state_ops.where(self.fresh[inside] | ~exist, fresh, state_ops.select(self.state, inside))
        state = state_ops.select(self.state, rows)
        if torch.compiler.is_compiling() or self._any_fresh:
            state = state_ops.where(self.fresh.index_select(0, rows), self.initial(len(rows)), state)
        return state

    # --- writing ---------------------------------------------------------------------------------------------------

    def replace_all(self, state: State, shared: bool) -> None:
        """Make `state` the stored tensors. shared: a caller may hold some of them."""
        self.state, self._with_room, self._handed_out = state, None, shared
        if torch.compiler.is_compiling() or self._any_fresh:
            self.fresh, self._any_fresh = torch.zeros_like(self.fresh), False

    def write(self, rows: Tensor, state: State) -> None:
        """Copy `state` (leaves [len(rows), ...]) into these rows."""
        rows = rows.to(self.fresh.device)
        self._update(rows, state)
        self._mark(rows, False)

    def reset(self, rows: Tensor | None) -> None:
        """Mark rows as fresh; None: all. Those that do not exist are ignored, as in `read`."""
        if rows is None:
            self.fresh, self._with_room = torch.ones_like(self.fresh), None
        else:
            rows = rows[rows < self.count] if values_are_readable(rows) else rows
            self._mark(rows.to(self.fresh.device), True)
        self._any_fresh = self.count > 0

    def unshare(self) -> None:
        """Copy the stored tensors, so that nobody else holds them."""
        self.state, self._with_room, self._handed_out = state_ops.clone(self.state), None, False

    def _update(self, rows: Tensor, new: State) -> None:
        """In place, unless a caller may hold the stored tensors."""
        replace = torch.compiler.is_compiling() or self._handed_out
        if replace or any(leaf.is_inference() for leaf in state_ops.leaves(self.state)):
            self.state = state_ops.tree_map(lambda s, n: s.index_copy(0, rows, n), self.state, new)
            self._with_room, self._handed_out = None, False
        else:
            state_ops.tree_map(lambda s, n: s.index_copy_(0, rows, n), self.state, new)

    def _mark(self, rows: Tensor, fresh: bool) -> None:
        if torch.compiler.is_compiling() or self.fresh.is_inference():
            self.fresh, self._with_room = self.fresh.index_fill(0, rows, fresh), None
        else:
            self.fresh.index_fill_(0, rows, fresh)

    # --- how many, and in which order --------------------------------------------------------------------------------

    def grow(self, count: int, exactly: bool = False) -> None:
        """Add fresh rows. Unless `exactly`, room for as many again is allocated, so that rows may be added one by one."""
        before = self.count
        with torch.inference_mode(False):
            if self._with_room is None or len(self._with_room[0]) < count:
                room = count - before if exactly else max(count - before, before)

                def longer(leaf: Tensor) -> Tensor:
                    return torch.cat([leaf, leaf.new_zeros(room, *leaf.shape[1:])])

                self._with_room = state_ops.tree_map(longer, (self.fresh, self.state))
                self._handed_out = False
            self.fresh, self.state = state_ops.tree_map(lambda leaf: leaf[:count], self._with_room)
            self.fresh[before:] = True
        self._any_fresh = True

    def shrink(self, count: int) -> None:
        """Keep the first `count` rows; frees room when less than half of it is used."""
        whole = (self.fresh, self.state) if self._with_room is None else self._with_room
        self.fresh, self.state = state_ops.tree_map(lambda leaf: leaf[:count], (self.fresh, self.state))
        self._with_room = whole
        if len(whole[0]) > 2 * count:
            self.fresh, self.state = state_ops.clone((self.fresh, self.state))
            self._with_room, self._handed_out = None, False

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy each row `sources[i]` over row `targets[i]`."""
        if not targets:
            return
        of, to = (torch.tensor(part, device=self.fresh.device) for part in (sources, targets))
        self._update(to, state_ops.select(self.state, of))
        if self.fresh.is_inference():
            self.fresh, self._with_room = self.fresh.clone(), None
        self.fresh.index_copy_(0, to, self.fresh[of])

    def reorder(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        order = torch.tensor(rows, dtype=torch.long, device=self.fresh.device)
        self.fresh, self.state = state_ops.select((self.fresh, self.state), order)
        self._with_room, self._handed_out = None, False

    # --- copies ----------------------------------------------------------------------------------------------------

    def saved(self, rows: Tensor | None) -> dict[str, Any]:
        """A copy of these rows on the host, as plain tensors and numbers; None: all in order."""

        def copied(leaf: Tensor) -> Tensor:
            leaf = leaf.to("cpu", copy=rows is None)
            return leaf if rows is None else leaf.index_select(0, rows)

        return {
            "num_rows": self.count,
            "known": torch.ones(self.count, dtype=torch.bool),  # 0.1 had rows for unknown ids
            "fresh": copied(self.fresh),
            "leaves": [copied(leaf) for leaf in state_ops.ordered_leaves(self.state, self.core.row_shapes())],
        }

    def load(self, fresh: Tensor, leaves: list[Tensor]) -> None:
        """Replace everything by copies of these marks and leaves, which the caller has checked."""
        shapes = self.core.row_shapes()
        self._placement = self.core.dtype_and_device()
        copies = state_ops.from_leaves([leaf.detach().clone() for leaf in leaves], like=shapes)
        self.state = state_ops.convert(copies, shapes, *self._placement)
        self.fresh, self._with_room = fresh.to(self._placement[1], copy=True), None
        self._any_fresh, self._handed_out = bool(fresh.any()), False


def saved_parts(d: Any, core: Core) -> tuple[list[int], Tensor, list[Tensor]]:
    """The ids, fresh marks and leaves of a saved memory, checked: known rows only, in id order."""
    parts = ("num_rows", "known", "fresh", "leaves")
    if not isinstance(d, dict) or not all(part in d for part in parts):
        got = f"a dict with keys {sorted(map(str, d))}" if isinstance(d, dict) else f"a {type(d).__name__}"
        raise ValueError(f"expected what memory.state_dict() returned (keys {', '.join(parts)}), got {got}")
    num_rows, known, fresh, stored = (d[part] for part in parts)
    expected = [(num_rows, *row.shape) for row in state_ops.leaves(core.row_shapes())]
    came = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in stored]
    if came != expected:
        raise ValueError(f"this memory is of another core: its leaves have shapes {came}, expected {expected}")
    for name, mask in (("known", known), ("fresh", fresh)):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (num_rows,):
            raise ValueError(f"this memory is damaged: {name!r} is not one flag for each of its {num_rows} rows")
    ids = d.get("ids")
    if ids is None:
        rows = known.cpu().nonzero().squeeze(1)
        if len(rows) < num_rows:
            fresh, stored = fresh.cpu()[rows], [leaf.cpu()[rows] for leaf in stored]
        return rows.tolist(), fresh, stored
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.shape != (num_rows,):
        raise ValueError(f"this memory is damaged: 'ids' is not one id for each of its {num_rows} rows")
    as_list: list[int] = ids.tolist()
    if as_list != sorted(set(as_list)) or (as_list and as_list[0] < 0):
        raise ValueError("this memory is damaged: its ids are not different, ascending and at least 0")
    return as_list, fresh, stored
