"""`Memory`: the states of many environments, one row each, keyed by environment id.

`write` detaches and copies; `read` gives a snapshot that no later write, reset or growth changes. That
needs no full copy per step, because a write *replaces* stored tensors once they were handed out. A fresh row (never
written, reset, forgotten) is a mark, not numbers: reading it gives the core's current initial state, so a learned start
is never stale. Memory knows nothing about time, episodes or gradients.

>>> import holdfast as hf
>>> core = hf.GRU(4, 8)
>>> memory = hf.Memory(core)
>>> memory.write(core.initial_state(2), [5, 2])
>>> memory.num_envs, memory.read([2, 7])["h"].shape      # 7 is unknown: a fresh row
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

    Ids are small non-negative integers. Ids on the host are checked and rows appear as they are needed; ids that lie on
    a GPU, or come through `torch.compile`, are not checked and must have been reserved (`reserve(n)`).
    """

    def __init__(self, core: Core, max_envs: int = 2**20) -> None:
        if not isinstance(core, Core):
            raise TypeError(
                f"Memory needs a core (hf.LSTM, ...), got a {type(core).__name__}; for a policy: policy.core"
            )
        self.core = core
        self.max_envs = max_envs
        self._state: State = None  # leaves [rows, ...]
        self._placement: Any = None  # the core's dtype and device when the state was last moved there
        self._fresh: Tensor = torch.empty(0, dtype=torch.bool)  # [rows] on the core's device
        self._known: Tensor = torch.empty(0, dtype=torch.bool)  # [rows] on the host
        self._num_envs = 0
        self._any_fresh = False
        self._handed_out = False  # a caller may hold the stored tensors: replace them, do not update them
        self.in_place = False  # see `update_in_place`

    def __repr__(self) -> str:
        return f"Memory({self.num_envs} environments of {type(self.core).__name__}({self.core.extra_repr()}))"

    @property
    def num_envs(self) -> int:
        """How many environments are known."""
        return self._num_envs

    @property
    def num_rows(self) -> int:
        """The highest known id + 1."""
        return self._fresh.shape[0]

    # --- reading and writing ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, env_ids: EnvIds = None) -> State:
        """A snapshot of the rows of `env_ids`, in that order; None: all known rows in id order.

        It has no graph and can be used in backward, also when it was taken under `torch.inference_mode`.
        """
        if env_ids is None and self._num_envs != self.num_rows:
            env_ids = self._known.nonzero().squeeze(1)
        # without_graph rebuilds the tree, so that a caller who replaces a leaf of it does not replace ours.
        state = state_ops.without_graph(self._read(self._rows(env_ids)))
        return state_ops.clone(state) if self.in_place and env_ids is None else state

    @torch.no_grad()
    def write(self, state: State, env_ids: EnvIds = None) -> None:
        """Store `state` (leaves [len(env_ids), ...]) as the rows of `env_ids`; None: ids 0..B-1 in order.

        Detaches and copies. Checks everything before it changes anything.
        """
        rows = self._rows(env_ids)
        batch = state_ops.batch_size(state) if rows is None else len(rows)
        batch = self.num_rows if batch is None else batch  # a core without a state
        self.core.check_state(state, batch)
        if rows is None:
            self._check_covers_all(batch)
        self._make_known(batch, rows)
        self._store(state_ops.clone(state_ops.without_graph(state)), rows)

    def reset(self, env_ids: EnvIds = None) -> None:
        """Make rows fresh; they stay known. None: all. Unknown ids are fresh already."""
        rows = self._rows(env_ids)
        if rows is None:
            self._fresh = torch.ones_like(self._fresh)
        else:
            if values_are_readable(rows):
                rows = rows[rows < self.num_rows]
            self._fresh = self._fresh.index_fill(0, rows, True)
        self._any_fresh = self.num_rows > 0

    def forget(self, env_ids: EnvIds) -> None:
        """Drop environments; they are unknown afterwards, and fresh if they appear again."""
        rows = self._rows(env_ids)
        if rows is None:
            self._resize(0)
            return
        known = rows.cpu()
        known = known[known < self.num_rows]
        self.reset(known)
        self._known = self._known.index_fill(0, known, False)
        left = self._known.nonzero()
        self._num_envs = len(left)
        self._resize(int(left[-1]) + 1 if len(left) else 0)

    def reserve(self, num_envs: int) -> None:
        """Make ids 0..num_envs-1 known ahead of time; new ones are fresh."""
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 0:
            raise ValueError(f"reserve takes a number of environments, got {num_envs!r}")
        if num_envs > self.max_envs:
            raise ValueError(
                f"{num_envs} environments are more than max_envs={self.max_envs}; raise it: Memory(core, max_envs=...)"
            )
        self._follow_core()
        dense = self._num_envs == self.num_rows  # no holes: counting needs no look at the tensor
        self._resize(max(num_envs, self.num_rows))
        if dense:
            self._known, self._num_envs = torch.ones(self.num_rows, dtype=torch.bool), self.num_rows
        else:
            self._known[:num_envs] = True
            self._num_envs = int(self._known.sum())

    # --- one step of a policy: no copies that can be avoided ---------------------------------------------------------

    def update_in_place(self) -> None:
        """From now on `policy.act` for all rows may update the stored tensors (`Core.advance_`), and `read` copies.

        For the rollout that owns this memory: a state that is large, like a ring of keys, is then not copied per step.
        """
        if self.core.supports_advance and not self.in_place:
            self._follow_core()
            self._state, self.in_place = state_ops.clone(self._state), True  # snapshots may hold the tensors of before

    def expect(self, batch: int, env_ids: EnvIds) -> None:
        """Under the compiler: reserve the rows first, so that the first graph serves all later steps too."""
        if env_ids is None and torch.compiler.is_compiling():
            self._reserve_while_tracing(len(range(batch)))  # len(range()) makes a symbolic size a number

    def take(self, batch: int, env_ids: EnvIds = None) -> tuple[State, Tensor | None]:
        """The state of the `batch` environments that act now, and their rows as `put` takes them. Changes nothing.

        The state is read-only: it may be the stored tensors themselves.
        """
        rows = self._rows(env_ids)
        if rows is not None and len(rows) != batch:
            raise ValueError(f"{batch} observations came with {len(rows)} env_ids; pass one id per row")
        state = self._read(rows)
        if rows is None:
            self._check_covers_all(batch)
            if batch > self.num_rows:  # new environments: fresh rows after the known ones
                new = self._fresh_rows(batch - self.num_rows)
                state = state_ops.tree_map(lambda s, n: torch.cat([s, n]), state, new)
        return state, rows

    def put(self, state: State, rows: Tensor | None) -> None:
        """Store the state that the core has just returned; it belongs to the memory from now on.

        Rows appear here and not in `take`, so that an error between the two leaves no trace.
        """
        self._make_known(state_ops.batch_size(state) or 0, rows)
        self._store(state_ops.without_graph(state), rows)
        if rows is None:
            # A core may have passed a leaf through untouched, and then an earlier snapshot holds it too.
            self._handed_out = True

    # --- copies ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy as plain tensors and numbers, on the host."""
        self._follow_core()
        stored = state_ops.ordered_leaves(self._state, self.core.row_shapes())
        return {
            "num_rows": self.num_rows,
            "known": self._known.clone(),
            "fresh": self._fresh.cpu().clone(),
            "leaves": [leaf.to("cpu", copy=True) for leaf in stored],
        }

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Take over a copy; refused as a whole if it is of another core."""
        parts = ("num_rows", "known", "fresh", "leaves")
        if not isinstance(d, dict) or not all(part in d for part in parts):
            got = f"a dict with keys {sorted(map(str, d))}" if isinstance(d, dict) else f"a {type(d).__name__}"
            raise ValueError(f"expected what memory.state_dict() returned (keys {', '.join(parts)}), got {got}")
        num_rows, known, fresh, stored = (d[part] for part in parts)
        shapes = self.core.row_shapes()
        expected = [(num_rows, *row.shape) for row in state_ops.leaves(shapes)]
        came = [tuple(leaf.shape) for leaf in stored]
        if came != expected or len(known) != num_rows or len(fresh) != num_rows:
            raise ValueError(f"this memory is of another core: its leaves have shapes {came}, expected {expected}")
        self._placement = self.core.dtype_and_device()
        copies = state_ops.from_leaves([leaf.detach().clone() for leaf in stored], like=shapes)
        self._state = state_ops.convert(copies, shapes, *self._placement)
        self._known, self._fresh = known.to("cpu", copy=True), fresh.to(self._placement[1], copy=True)
        self._num_envs = int(known.sum())
        self._any_fresh, self._handed_out = bool(fresh.any()), False

    # --- inside ----------------------------------------------------------------------------------------------------

    def _rows(self, env_ids: EnvIds) -> Tensor | None:
        """Checked ids on the core's device; None: all rows in order."""
        self._follow_core()
        if env_ids is None:
            return None
        return as_env_ids(env_ids, self.num_rows, self.max_envs).to(self._fresh.device)

    def _check_covers_all(self, batch: int) -> None:
        if batch < self.num_rows:
            raise ValueError(
                f"{batch} rows came, but this memory knows {self.num_rows} environments (ids 0..{self.num_rows - 1}): "
                "pass env_ids=, or memory= for another set of environments"
            )

    def _follow_core(self) -> None:
        """Move to the core's device and dtype, if they changed."""
        placement = self.core.dtype_and_device()
        if placement == self._placement:
            return
        if self._state is None:
            self._state = state_ops.detach(self.core.initial_state(0))
        else:
            self._state = state_ops.convert(self._state, self.core.row_shapes(), *placement)
        self._fresh, self._placement = self._fresh.to(placement[1]), placement

    def _make_known(self, batch: int, rows: Tensor | None) -> None:
        """Make the rows exist. Ids whose values may not be read must have been reserved."""
        if rows is None:
            if self._num_envs < batch:
                self.reserve(batch)
            return
        readable = values_are_readable(rows) or len(rows) > self.num_rows
        if torch.compiler.is_compiling() or len(rows) == 0 or not readable:
            return
        self._resize(max(int(rows.max()) + 1, self.num_rows))
        self._known = self._known.index_fill(0, rows.cpu(), True)
        self._num_envs = int(self._known.sum())

    def _resize(self, num_rows: int) -> None:
        """Exactly `num_rows` rows; new ones are fresh and unknown. Growth is rare, so no amortization."""
        extra = num_rows - self.num_rows
        if extra > 0:
            self._state = state_ops.tree_map(lambda s: torch.cat([s, s.new_zeros(extra, *s.shape[1:])]), self._state)
            self._fresh = torch.cat([self._fresh, self._fresh.new_ones(extra)])
            self._known = torch.cat([self._known, self._known.new_zeros(extra)])
            self._any_fresh, self._handed_out = True, False
        elif extra < 0:
            self._state = state_ops.tree_map(lambda s: s[:num_rows].clone(), self._state)
            self._fresh, self._known = self._fresh[:num_rows].clone(), self._known[:num_rows].clone()
            self._num_envs, self._handed_out = int(self._known.sum()), False

    def _fresh_rows(self, count: int) -> State:
        return state_ops.without_graph(self.core.initial_state(count))

    def _read(self, rows: Tensor | None) -> State:
        may_be_fresh = torch.compiler.is_compiling() or self._any_fresh
        if rows is None:
            if may_be_fresh:
                return state_ops.where(self._fresh, self._fresh_rows(self.num_rows), self._state)
            self._handed_out = True
            return self._state
        if values_are_readable(rows) and len(rows) and int(rows.max()) >= self.num_rows:
            return self._read_with_unknown(rows)
        state = state_ops.select(self._state, rows)
        if may_be_fresh:
            state = state_ops.where(self._fresh.index_select(0, rows), self._fresh_rows(len(rows)), state)
        return state

    def _read_with_unknown(self, rows: Tensor) -> State:
        """Rows of which some are unknown, and so fresh."""
        fresh = self._fresh_rows(len(rows))
        if self.num_rows == 0:
            return state_ops.clone(fresh)
        known = rows < self.num_rows
        inside = torch.where(known, rows, 0)
        return state_ops.where(self._fresh[inside] | ~known, fresh, state_ops.select(self._state, inside))

    def _store(self, state: State, rows: Tensor | None) -> None:
        if rows is None:
            self._state, self._fresh = state, torch.zeros_like(self._fresh)
            self._any_fresh, self._handed_out = False, False
            return
        replace = torch.compiler.is_compiling() or self._handed_out
        if replace or any(leaf.is_inference() for leaf in state_ops.leaves(self._state)):
            self._state = state_ops.tree_map(lambda s, new: s.index_copy(0, rows, new), self._state, state)
            self._handed_out = False
        else:
            state_ops.tree_map(lambda s, new: s.index_copy_(0, rows, new), self._state, state)
        self._fresh = self._fresh.index_fill(0, rows, False)

    def _reserve_while_tracing(self, batch: int) -> bool:
        """Runs while the compiler traces, not in the graph: a graph made for a memory without rows serves one call."""
        if batch > self._num_envs and self._num_envs == self.num_rows:
            self.reserve(batch)
        return True

    # As in kernels/cpu/recurrence.py: torch.compiler.assume_constant_result would import the whole compiler.
    _reserve_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
