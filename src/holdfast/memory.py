"""`Memory`: the states of many environments, one row each, keyed by environment id.

`write` detaches and copies; `read` gives a copy. A step of a policy (`take`, `put`) copies nothing that can be avoided: a
write *replaces* stored tensors once they were handed out. A fresh row (never written, reset, forgotten) is a mark, not
numbers: reading it gives the core's current initial state, so a learned start is never stale. Memory knows nothing about
time, episodes or gradients.

Ids 0..n-1 are their own row numbers. With any other ids `_row_of` says where each row is, so an id costs one row
however large it is.

>>> import holdfast as hf
>>> core = hf.GRU(4, 8)
>>> memory = hf.Memory(core)
>>> memory.write(core.initial_state(2), [5, 10**12])
>>> memory.num_envs, memory.read([5, 7])["h"].shape      # 7 is unknown: a fresh row
(2, torch.Size([2, 1, 8]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.checks import as_env_ids, values_are_readable
from holdfast.cores.base import Core
from holdfast.state import State

EnvIds = Tensor | Sequence[int] | slice | range | int | None


class Memory:
    """Rows of state for the environments of one core.

    Ids are non-negative integers. Ids on the host are checked and rows appear as they are needed. Ids that lie on a GPU,
    or come through `torch.compile`, are not checked and must have been reserved (`reserve(n)`). max_envs: how many
    environments may be known at once. Not thread-safe; `hf.Runner` is.
    """

    def __init__(self, core: Core, max_envs: int = 2**20) -> None:
        if not isinstance(core, Core):
            raise TypeError(
                f"Memory needs a core (hf.LSTM, ...), got a {type(core).__name__}; for a policy: policy.core"
            )
        self.core = core
        self.max_envs = max_envs
        self.writes = 0
        """How often states were stored; compiled steps are not counted. Tells its owner of another's writes."""
        self.last_user: str | None = None
        """Who stored the states, where that is known; None after everything was reset, forgotten or loaded."""
        self._placement: Any = None  # the core's dtype and device when the state was last moved there
        self._state: State = None  # leaves [rows, ...]
        self._fresh: Tensor = torch.empty(0, dtype=torch.bool)  # [rows] on the core's device
        self._with_room: tuple[Tensor, State] | None = None  # larger tensors that begin with _fresh and _state
        self._row_of: dict[int, int] | None = None  # None: the ids are 0..rows-1, in order
        self._id_of: list[int] = []  # the inverse of _row_of
        self._any_fresh = False
        self._handed_out = False  # a caller may hold the stored tensors: replace them, do not update them
        self.in_place = False  # see `update_in_place`

    def __repr__(self) -> str:
        envs = f"{self.num_envs} environment{'s' * (self.num_envs != 1)}"
        return f"Memory({envs} of {type(self.core).__name__}({self.core.extra_repr()}))"

    @property
    def num_envs(self) -> int:
        """How many environments are known; each has one row."""
        return self._fresh.shape[0]

    @property
    def num_rows(self) -> int:
        """`num_envs`."""
        return self.num_envs

    @property
    def env_ids(self) -> list[int]:
        """The ids of the known environments, ascending."""
        return list(range(self.num_envs)) if self._row_of is None else sorted(self._row_of)

    # --- reading and writing ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, env_ids: EnvIds = None) -> State:
        """A copy of the rows of `env_ids`, in that order; None: all known rows in id order. Unknown ids are fresh.

        It has no graph and can be used in backward, also when it was taken under `torch.inference_mode`.
        """
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.read(env_ids)
        ids = self._checked(env_ids)
        if ids is None and self._row_of is not None:
            ids = torch.tensor(self.env_ids)
        return state_ops.clone(self._read_all()) if ids is None else self._read_ids(ids)

    @torch.no_grad()
    def write(self, state: State, env_ids: EnvIds = None) -> None:
        """Store `state` (leaves [len(env_ids), ...]) as the rows of `env_ids`; None: ids 0..B-1 in order.

        Detaches and copies. Checks everything before it changes anything.
        """
        ids = self._checked(env_ids)
        batch = state_ops.batch_size(state) if ids is None else len(ids)
        batch = self.num_envs if batch is None else batch  # a core without a state
        self.core.check_state(state, batch)
        if ids is None:
            self._check_covers_all(batch)
        self._store(state_ops.clone(state_ops.without_graph(state)), ids, batch)

    def reset(self, env_ids: EnvIds = None) -> None:
        """Reset rows; they stay known. None: all. Unknown ids are fresh already."""
        ids = self._checked(env_ids)
        if ids is None:
            self._fresh, self._with_room = torch.ones_like(self._fresh), None
            self.last_user = None
        else:
            self._mark_fresh(self._known_rows(ids), True)
        self._any_fresh = self.num_envs > 0

    def forget(self, env_ids: EnvIds) -> None:
        """Drop environments and their rows; they are unknown afterwards, and fresh if they appear again. None: all."""
        ids = self._checked(env_ids)
        gone = list(range(self.num_envs)) if ids is None else self._known_rows(ids).tolist()
        left = self.num_envs - len(gone)
        if left == 0:
            self._row_of, self._id_of, self.last_user = None, [], None
        elif self._row_of is not None or min(gone, default=left) < left:
            self._fill_holes(gone, left)
        self._shrink(left)

    def reserve(self, num_envs: int) -> None:
        """Make ids 0..num_envs-1 known ahead of time; new ones are fresh."""
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 0:
            raise ValueError(f"reserve takes a number of environments, got {num_envs!r}")
        self._follow_core()
        if self._row_of is not None:
            self._add_ids([i for i in range(num_envs) if i not in self._row_of])
            self._order_rows()
        elif num_envs > self.num_envs:
            self._grow(num_envs, exactly=True)

    # --- one step of a policy: no copies that can be avoided ---------------------------------------------------------

    def update_in_place(self) -> None:
        """From now on `policy.act` for all rows may update the stored tensors (`Core.advance_`), which `take` gives.

        For the rollout that owns this memory: a state that is large, like a ring of keys, is then not copied per step.
        """
        if self.core.supports_advance and not self.in_place:
            self._follow_core()
            self._state, self._with_room = (
                state_ops.clone(self._state),
                None,
            )  # snapshots may hold the tensors of before
            self.in_place = True

    def expect(self, batch: int, env_ids: EnvIds) -> None:
        """Under the compiler: reserve the rows first, so that the first graph serves all later steps too."""
        if env_ids is None and torch.compiler.is_compiling():
            self._reserve_while_tracing(len(range(batch)))  # len(range()) makes a symbolic size a number

    def take(self, batch: int, env_ids: EnvIds = None) -> tuple[State, Tensor | None]:
        """The state of the `batch` environments that act now, and their ids as `put` takes them. Changes nothing.

        The state is read-only: it may be the stored tensors themselves.
        """
        ids = self._checked(env_ids)
        if ids is not None:
            if len(ids) != batch:
                raise ValueError(f"got {batch} observations with {len(ids)} env_ids; pass one id per row")
            return self._read_ids(ids), ids
        self._check_covers_all(batch)
        if self._row_of is not None:
            return self._read_ids(torch.arange(batch)), None
        state = self._read_all()
        if batch > self.num_envs:  # new environments: fresh rows after the known ones
            new = self._fresh_rows(batch - self.num_envs)
            state = state_ops.tree_map(lambda s, n: torch.cat([s, n]), state, new)
        return state, None

    def put(self, state: State, env_ids: Tensor | None) -> None:
        """Store the state that the core has just returned; it belongs to the memory from now on.

        Rows appear here and not in `take`, so that an error between the two leaves no trace.
        """
        self._store(state_ops.without_graph(state), env_ids, state_ops.batch_size(state) or 0)
        if env_ids is None:
            # A core may have passed a leaf through untouched, and then an earlier snapshot holds it too.
            self._handed_out = True

    # --- copies ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy as plain tensors and numbers, on the host. Rows are in id order; `ids` is there unless they are 0..n-1."""
        self._follow_core()
        order = None if self._row_of is None else torch.tensor([self._row_of[i] for i in self.env_ids])

        def saved(rows: Tensor) -> Tensor:
            rows = rows.to("cpu", copy=order is None)
            return rows if order is None else rows.index_select(0, order)

        d = {
            "num_rows": self.num_envs,
            "known": torch.ones(self.num_envs, dtype=torch.bool),  # 0.1 had rows for unknown ids
            "fresh": saved(self._fresh),
            "leaves": [saved(leaf) for leaf in state_ops.ordered_leaves(self._state, self.core.row_shapes())],
        }
        return d if order is None else {**d, "ids": torch.tensor(self.env_ids)}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Restore a copy; refused as a whole if it is of another core."""
        ids, fresh, stored = _saved_parts(d, self.core)
        self._placement = self.core.dtype_and_device()
        self._state = state_ops.convert(
            state_ops.from_leaves([leaf.detach().clone() for leaf in stored], like=self.core.row_shapes()),
            self.core.row_shapes(),
            *self._placement,
        )
        self._fresh, self._with_room = fresh.to(self._placement[1], copy=True), None
        dense = ids == list(range(len(ids)))
        self._row_of = None if dense else {env_id: row for row, env_id in enumerate(ids)}
        self._id_of = [] if dense else ids
        self._any_fresh, self._handed_out, self.last_user = bool(fresh.any()), False, None

    # --- which row -------------------------------------------------------------------------------------------------

    def _checked(self, env_ids: EnvIds) -> Tensor | None:
        """Checked ids [B]; None: all rows in order."""
        self._follow_core()
        if env_ids is None:
            return None
        if isinstance(env_ids, slice) and env_ids.stop is None and self._row_of is not None:
            first, step = env_ids.start or 0, env_ids.step or 1  # of the known ids alone: they may be far apart
            env_ids = sorted(i for i in self._row_of if i >= first and (i - first) % step == 0)
        end = self._last_id() + 1 if isinstance(env_ids, slice) else 0
        ids = as_env_ids(env_ids, end)
        if self._row_of is None:
            return ids
        if torch.compiler.is_compiling():
            raise ValueError("a compiled step takes ids 0..n-1 that are reserved; call memory.reserve(n) first")
        return ids.cpu()

    def _last_id(self) -> int:
        return self.num_envs - 1 if self._row_of is None else max(self._row_of)

    def _rows(self, ids: Tensor) -> Tensor:
        """The rows of checked ids, on the core's device; those of unknown ids are `num_envs` or more."""
        if self._row_of is None:
            return ids.to(self._fresh.device)
        none = self.num_envs
        return torch.tensor([self._row_of.get(i, none) for i in ids.tolist()], dtype=torch.long).to(self._fresh.device)

    def _some_unknown(self, ids: Tensor) -> bool:
        if self._row_of is not None:
            return any(i not in self._row_of for i in ids.tolist())
        return values_are_readable(ids) and len(ids) > 0 and int(ids.max()) >= self.num_envs

    def _known_rows(self, ids: Tensor) -> Tensor:
        rows = self._rows(ids)
        return rows[rows < self.num_envs] if values_are_readable(ids) else rows

    def _check_covers_all(self, batch: int) -> None:
        last = self._last_id()
        if batch <= last:
            known = f"ids 0..{last}" if self._row_of is None else f"ids up to {last}"
            raise ValueError(
                f"got {batch} row{'s' * (batch != 1)}, but this memory knows {self.num_envs} "
                f"environment{'s' * (self.num_envs != 1)} ({known}): "
                "pass env_ids=, or memory= for another set of environments"
            )

    def _make_known(self, ids: Tensor) -> None:
        """Make the rows exist. Ids whose values may not be read must have been reserved."""
        if torch.compiler.is_compiling() or len(ids) == 0:
            return
        if self._row_of is not None:
            self._add_ids([i for i in ids.tolist() if i not in self._row_of])
        elif (values_are_readable(ids) or len(ids) > self.num_envs) and int(ids.max()) >= self.num_envs:
            new = ids[ids >= self.num_envs].tolist()
            if max(new) == self.num_envs + len(new) - 1:  # the next ones: ids stay their own row numbers
                self._grow(max(new) + 1)
            else:
                self._add_ids(new)

    def _add_ids(self, new: list[int]) -> None:
        if not new:
            return
        first, row_of = self.num_envs, self._map()
        self._grow(first + len(new))
        row_of.update({env_id: first + i for i, env_id in enumerate(new)})
        self._id_of += new

    def _map(self) -> dict[int, int]:
        """`_row_of`, made if the ids are still their own row numbers."""
        if self._row_of is None:
            self._id_of = list(range(self.num_envs))
            self._row_of = {i: i for i in self._id_of}
        return self._row_of

    def _order_rows(self) -> None:
        """Rows in id order, if the ids are 0..n-1 again."""
        if self._row_of is None or self._last_id() >= self.num_envs:
            return
        rows = self._rows(torch.arange(self.num_envs))
        self._fresh, self._state = state_ops.select((self._fresh, self._state), rows)
        self._row_of, self._id_of, self._with_room, self._handed_out = None, [], None, False

    # --- how many rows ---------------------------------------------------------------------------------------------

    def _grow(self, rows: int, exactly: bool = False) -> None:
        """Add fresh rows. Unless `exactly`, room for as many again is made, so that ids may come one by one."""
        if rows > self.max_envs:
            raise ValueError(
                f"{rows} environments are more than max_envs={self.max_envs}; forget() those that are gone, or raise it: "
                "Memory(core, max_envs=...)"
            )
        before = self.num_envs
        with torch.inference_mode(False):
            if self._with_room is None or len(self._with_room[0]) < rows:
                room = rows - before if exactly else max(rows - before, before)

                def longer(leaf: Tensor) -> Tensor:
                    return torch.cat([leaf, leaf.new_zeros(room, *leaf.shape[1:])])

                self._with_room = state_ops.tree_map(longer, (self._fresh, self._state))
                self._handed_out = False
            self._fresh, self._state = state_ops.tree_map(lambda leaf: leaf[:rows], self._with_room)
            self._fresh[before:] = True
        self._any_fresh = True

    def _shrink(self, rows: int) -> None:
        """Keep the first `rows` rows; gives room back when less than half of it is used."""
        whole = (self._fresh, self._state) if self._with_room is None else self._with_room
        self._fresh, self._state = state_ops.tree_map(lambda leaf: leaf[:rows], (self._fresh, self._state))
        self._with_room = whole
        if len(whole[0]) > 2 * rows:
            self._fresh, self._state = state_ops.clone((self._fresh, self._state))
            self._with_room, self._handed_out = None, False

    def _fill_holes(self, gone: list[int], left: int) -> None:
        """Drop the ids of the rows `gone`; rows past `left` that remain move into their place."""
        row_of = self._map()
        for row in gone:
            del row_of[self._id_of[row]]
        dropped = set(gone)
        holes = [row for row in gone if row < left]
        movers = [row for row in range(left, self.num_envs) if row not in dropped]
        for hole, mover in zip(holes, movers):
            env_id = self._id_of[mover]
            self._id_of[hole], row_of[env_id] = env_id, hole
        del self._id_of[left:]
        if holes:
            rows, moved = (torch.tensor(part, device=self._fresh.device) for part in (holes, movers))
            self._update(state_ops.select(self._state, moved), rows)
            if self._fresh.is_inference():
                self._fresh, self._with_room = self._fresh.clone(), None
            self._fresh.index_copy_(0, rows, self._fresh[moved])

    # --- inside ----------------------------------------------------------------------------------------------------

    def _follow_core(self) -> None:
        """Move to the core's device and dtype, if they changed."""
        placement = self.core.dtype_and_device()
        if placement == self._placement:
            return
        if self._state is None:
            self._state = state_ops.detach(self.core.initial_state(0))
        else:
            self._state = state_ops.convert(self._state, self.core.row_shapes(), *placement)
        self._fresh, self._with_room, self._placement = self._fresh.to(placement[1]), None, placement

    def _fresh_rows(self, count: int) -> State:
        return state_ops.without_graph(self.core.initial_state(count))

    def _read_all(self) -> State:
        """All rows as they are stored, which may be the stored tensors."""
        if torch.compiler.is_compiling() or self._any_fresh:
            return state_ops.where(self._fresh, self._fresh_rows(self.num_envs), self._state)
        self._handed_out = True
        return self._state

    def _read_ids(self, ids: Tensor) -> State:
        """A copy of the rows of checked ids; unknown ones are fresh."""
        rows = self._rows(ids)
        if self._some_unknown(ids):
            fresh = self._fresh_rows(len(rows))
            if self.num_envs == 0:
                return state_ops.clone(fresh)
            known = rows < self.num_envs
            inside = torch.where(known, rows, 0)
            return state_ops.where(self._fresh[inside] | ~known, fresh, state_ops.select(self._state, inside))
        state = state_ops.select(self._state, rows)
        if torch.compiler.is_compiling() or self._any_fresh:
            state = state_ops.where(self._fresh.index_select(0, rows), self._fresh_rows(len(rows)), state)
        return state

    def _store(self, state: State, ids: Tensor | None, batch: int) -> None:
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.writes += 1
        if ids is not None:
            self._make_known(ids)
            rows = self._rows(ids)
            self._update(state, rows)
            self._mark_fresh(rows, False)
            return
        if batch > self.num_envs or self._row_of is not None:
            self._check_covers_all(batch)
            self.reserve(batch)
        self._state, self._with_room, self._handed_out = state, None, False
        if compiling or self._any_fresh:
            self._fresh, self._any_fresh = torch.zeros_like(self._fresh), False

    def _update(self, new: State, rows: Tensor) -> None:
        """Replace these rows, in place unless somebody holds the stored tensors."""
        replace = torch.compiler.is_compiling() or self._handed_out
        if replace or any(leaf.is_inference() for leaf in state_ops.leaves(self._state)):
            self._state = state_ops.tree_map(lambda s, n: s.index_copy(0, rows, n), self._state, new)
            self._with_room, self._handed_out = None, False
        else:
            state_ops.tree_map(lambda s, n: s.index_copy_(0, rows, n), self._state, new)

    def _mark_fresh(self, rows: Tensor, fresh: bool) -> None:
        if torch.compiler.is_compiling() or self._fresh.is_inference():
            self._fresh, self._with_room = self._fresh.index_fill(0, rows, fresh), None
        else:
            self._fresh.index_fill_(0, rows, fresh)

    def _reserve_while_tracing(self, batch: int) -> bool:
        """Runs while the compiler traces, not in the graph: a graph made for a memory without rows serves one call."""
        if batch > self._last_id():
            self.reserve(batch)
        return True

    # As in kernels/cpu/recurrence.py: torch.compiler.assume_constant_result would import the whole compiler.
    _reserve_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _saved_parts(d: Any, core: Core) -> tuple[list[int], Tensor, list[Tensor]]:
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
