"""`Memory`: the states of many environments, one row each, keyed by environment id.

What goes in is detached and copied; what comes out is a snapshot that no later write, reset or growth changes. That
holds without copying everything each step because stored tensors are *replaced* by a write, never updated once they
were handed out. A fresh row (never written, reset, forgotten) is a mark, not numbers: reading it gives the core's
current initial state, so a learned start is never stale. Memory knows nothing about time, episodes or gradients.

>>> import holdfast as hf
>>> core = hf.GRU(4, 8)
>>> memory = hf.Memory(core)
>>> memory.write(core.initial_state(2), [5, 2])
>>> memory.num_envs, memory.read([2, 7])["h"].shape      # 7 is unknown: a fresh row
(2, torch.Size([2, 1, 8]))
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Integral
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.checks import values_are_readable
from holdfast.cores.base import Core
from holdfast.state import State

EnvIds = Tensor | Sequence[int] | slice | range | int | None

# How the ids of one call are held: all rows in order, or a LongTensor on the core's device.
_ALL = None

_memories: WeakValueDictionary[str, Memory] = WeakValueDictionary()
_numbers = itertools.count()


class Memory:
    """Rows of state for the environments of one core.

    Ids are small non-negative integers. Ids on the host are checked and rows appear as they are needed; ids that lie on
    a GPU, or come through `torch.compile`, are taken on trust and must have been reserved (`reserve(n)`).
    """

    def __init__(self, core: Core, max_envs: int = 2**20) -> None:
        if not isinstance(core, Core):
            raise TypeError(
                f"Memory needs a core (hf.LSTM, ...), got a {type(core).__name__}; for a policy: policy.core"
            )
        self.core = core
        self.max_envs = max_envs
        self._state: State = None  # leaves [rows, ...]
        self._fresh: Tensor = torch.empty(0, dtype=torch.bool)  # [rows] on the core's device
        self._known: Tensor = torch.empty(0, dtype=torch.bool)  # [rows] on the host
        self._num_envs = 0
        self._handed_out = False  # somebody may hold the stored tensors: replace them, do not update them
        self._any_fresh = False
        self._take_a_number()

    def _take_a_number(self) -> None:
        self._number = str(next(_numbers))  # a string: the compiler may take a changing integer for a variable
        _memories[self._number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled memory is another one."""
        self.__dict__.update(state)
        self._take_a_number()

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
        self._follow_core()
        if env_ids is None and self._num_envs != self.num_rows:
            env_ids = self._known.nonzero().squeeze(1)
        ids = self._ids(env_ids)
        # _without_graph rebuilds the tree, so that a caller who replaces a leaf of it does not replace ours.
        return _without_graph(self._read_all() if ids is _ALL else self._read_rows(ids))

    @torch.no_grad()
    def write(self, state: State, env_ids: EnvIds = None) -> None:
        """Store `state` (leaves [len(env_ids), ...]) as the rows of `env_ids`; None: ids 0..B-1 in order.

        Detaches and copies. Checks everything before it changes anything.
        """
        self._follow_core()
        ids = self._ids(env_ids)
        batch = _rows_of(state, default=self.num_rows) if ids is _ALL else len(ids)
        self.core.check_state(state, batch)
        if ids is _ALL:
            self._check_all_rows(batch)
        self._ensure(batch if ids is _ALL else ids)
        self._store(state_ops.clone(_without_graph(state)), ids)

    def reset(self, env_ids: EnvIds = None) -> None:
        """Make rows fresh; they stay known. None: all. Unknown ids are fresh already."""
        self._follow_core()
        ids = self._ids(env_ids)
        if ids is _ALL:
            self._fresh = torch.ones_like(self._fresh)
        else:
            if values_are_readable(ids):
                ids = ids[ids < self.num_rows]
            self._fresh = self._fresh.index_fill(0, ids, True)
        self._any_fresh = self.num_rows > 0

    def forget(self, env_ids: EnvIds) -> None:
        """Drop environments; they are unknown afterwards, and fresh if they appear again."""
        self._follow_core()
        ids = self._ids(env_ids)
        if ids is _ALL:
            self._resize(0)
            return
        host = ids.cpu()
        host = host[host < self.num_rows]
        if len(host) == 0:
            return
        self._fresh = self._fresh.index_fill(0, host.to(self._fresh.device), True)
        self._known = self._known.index_fill(0, host, False)
        self._any_fresh = True
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

    # --- what a policy uses in its step: no copies that can be avoided -----------------------------------------------

    def expect(self, batch: int, env_ids: EnvIds) -> None:
        """Under the compiler: have the rows ready, so that the first graph serves all later steps too."""
        if env_ids is None and torch.compiler.is_compiling():
            _reserve_while_tracing(self._number, len(range(batch)))  # len(range()) makes a symbolic size a number

    def take(self, batch: int, env_ids: EnvIds = None) -> tuple[State, Tensor | None]:
        """The state of the `batch` environments that act now, and their rows as `put` takes them. Changes nothing.

        The state is read-only: it may be the stored tensors themselves.
        """
        self._follow_core()
        ids = self._ids(env_ids)
        if ids is not _ALL:
            if len(ids) != batch:
                raise ValueError(f"{batch} observations came with {len(ids)} env_ids; pass one id per row")
            return self._read_rows(ids), ids
        self._check_all_rows(batch)
        if batch > self.num_rows:  # new environments: as many fresh rows below the known ones
            new = self._initial(batch - self.num_rows)
            return state_ops.tree_map(lambda s, n: torch.cat([s, n]), self._read_all(), new), ids
        return self._read_all(), ids

    def put(self, state: State, ids: Tensor | None) -> None:
        """Store the state that the core has just returned; it belongs to the memory from now on.

        Rows appear here and not in `take`, so that an error between the two leaves no trace.
        """
        self._ensure(_rows_of(state, default=self.num_rows) if ids is None else ids)
        self._store(_without_graph(state), ids)
        if ids is _ALL:
            # A core may have passed a leaf through untouched, and then an earlier snapshot holds it too.
            self._handed_out = True

    # --- copies ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy as plain tensors and numbers, on the host."""
        self._follow_core()
        return {
            "num_rows": self.num_rows,
            "known": self._known.clone(),
            "fresh": self._fresh.cpu().clone(),
            "leaves": [leaf.to("cpu", copy=True) for leaf in self._leaves()],
        }

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Take over a copy; refused whole if it is of another core."""
        self._follow_core()
        parts = ("num_rows", "known", "fresh", "leaves")
        if not isinstance(d, dict) or not all(part in d for part in parts):
            got = f"a dict with keys {sorted(map(str, d))}" if isinstance(d, dict) else f"a {type(d).__name__}"
            raise ValueError(f"expected what memory.state_dict() returned (keys {', '.join(parts)}), got {got}")
        rows, known, fresh, stored = (d[part] for part in parts)
        dtype, device = self.core.state_dtype(), self.core.device()
        spec = self.core.row_shapes()
        shapes = [(rows, *r.shape) for r in state_ops.leaves(spec)]
        came = [tuple(leaf.shape) for leaf in stored]
        if came != shapes or len(known) != rows or len(fresh) != rows:
            raise ValueError(f"this memory is of another core: its leaves have shapes {came}, expected {shapes}")
        new = iter([leaf.detach().to(device=device, dtype=dtype, copy=True) for leaf in stored])
        self._state = state_ops.tree_map(lambda _: next(new), spec)
        self._known, self._fresh = known.to("cpu", copy=True), fresh.to(device, copy=True)
        self._num_envs = int(known.sum())
        self._any_fresh, self._handed_out = bool(fresh.any()), False

    # --- inside ----------------------------------------------------------------------------------------------------

    def _leaves(self) -> list[Tensor]:
        return [] if self._state is None else state_ops.leaves(self._state)

    def _follow_core(self) -> None:
        """Move to the core's device and dtype, if they changed."""
        device = self.core.device()
        if self._state is None or self._fresh.device != device:
            self._fresh = self._fresh.to(device)
        if self._state is None:
            self._state = state_ops.detach(self.core._initial_state(0))
            return
        stored, dtype = self._leaves(), self.core.state_dtype()
        if stored and (stored[0].dtype != dtype or stored[0].device != device):
            self._state = state_ops.to(self._state, device=device, dtype=dtype)

    def _as_tensor(self, env_ids: Any) -> Tensor:
        if isinstance(env_ids, slice):
            stop = env_ids.stop if env_ids.stop is not None else self.num_rows
            env_ids = range(env_ids.start or 0, stop, env_ids.step or 1)
        if isinstance(env_ids, range):
            return torch.arange(env_ids.start, env_ids.stop, env_ids.step)
        if isinstance(env_ids, Integral) and not isinstance(env_ids, bool):
            return torch.tensor([int(env_ids)])
        if isinstance(env_ids, Tensor):
            return env_ids
        try:
            ids = torch.as_tensor(env_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"env_ids are {env_ids!r}, expected integers: a list, slice, range or tensor") from error
        return ids.long() if ids.numel() == 0 else ids

    def _ids(self, env_ids: EnvIds) -> Tensor | None:
        """Checked ids on the core's device, or `_ALL`."""
        if env_ids is None:
            return _ALL
        ids = self._as_tensor(env_ids)
        if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
            hint = "; a mask is not a list of ids: use mask.nonzero().squeeze(1)" if ids.dtype == torch.bool else ""
            raise TypeError(f"env_ids have dtype {ids.dtype}, expected integers{hint}")
        if ids.dim() != 1:
            raise ValueError(f"env_ids have shape {tuple(ids.shape)}, expected one dimension [B]")
        ids = ids.long()
        if values_are_readable(ids) and len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0:
                raise ValueError(f"env_ids hold the negative id {low}")
            if high >= self.max_envs:
                raise ValueError(
                    f"env_ids hold {high}, but ids must be below max_envs={self.max_envs}; "
                    "ids are row numbers, so number your environments from 0, or raise max_envs"
                )
            seen, counts = ids.unique(return_counts=True)
            if len(seen) != len(ids):
                raise ValueError(f"env_ids hold {seen[counts > 1].tolist()} more than once; one row per environment")
        return ids.to(self._fresh.device)

    def _check_all_rows(self, batch: int) -> None:
        if batch < self.num_rows:
            raise ValueError(
                f"{batch} rows came, but this memory knows {self.num_rows} environments (ids 0..{self.num_rows - 1}): "
                "pass env_ids=, or memory= for another set of environments"
            )

    def _ensure(self, ids_or_batch: Tensor | int) -> None:
        """Make the rows exist. Ids that may not be looked at must have been reserved."""
        if isinstance(ids_or_batch, int):
            if ids_or_batch > self.num_rows or self._num_envs < ids_or_batch:
                self.reserve(ids_or_batch)
            return
        ids = ids_or_batch
        if torch.compiler.is_compiling() or len(ids) == 0:
            return
        if not values_are_readable(ids) and len(ids) <= self.num_rows:
            return
        high = int(ids.max())
        if high >= self.num_rows:
            self._resize(high + 1)
        known = self._known.index_fill(0, ids.cpu(), True)
        self._known, self._num_envs = known, int(known.sum())

    def _resize(self, rows: int) -> None:
        """Exactly `rows` rows; new ones are fresh and unknown. Amortised by nobody: growth is rare."""
        old = self.num_rows
        if rows > old:
            extra = rows - old
            self._state = state_ops.tree_map(lambda s: torch.cat([s, s.new_zeros(extra, *s.shape[1:])]), self._state)
            self._fresh = torch.cat([self._fresh, self._fresh.new_ones(extra)])
            self._known = torch.cat([self._known, self._known.new_zeros(extra)])
            self._any_fresh, self._handed_out = True, False
        elif rows < old:
            self._state = state_ops.tree_map(lambda s: s[:rows].clone(), self._state)
            self._fresh, self._known = self._fresh[:rows].clone(), self._known[:rows].clone()
            self._num_envs, self._handed_out = int(self._known.sum()), False

    def _initial(self, rows: int) -> State:
        return _without_graph(self.core._initial_state(rows))

    def _read_all(self) -> State:
        if torch.compiler.is_compiling() or self._any_fresh:
            return state_ops.where(self._fresh, self._initial(self.num_rows), self._state)
        self._handed_out = True
        return self._state

    def _read_rows(self, ids: Tensor) -> State:
        if values_are_readable(ids) and len(ids) and int(ids.max()) >= self.num_rows:  # unknown ids are fresh
            known = ids < self.num_rows
            inside = torch.where(known, ids, 0)
            if self.num_rows == 0:
                return state_ops.clone(self._initial(len(ids)))
            fresh = self._fresh[inside] | ~known
            return state_ops.where(fresh, self._initial(len(ids)), state_ops.select(self._state, inside))
        rows = state_ops.select(self._state, ids)
        if torch.compiler.is_compiling() or self._any_fresh:
            rows = state_ops.where(self._fresh.index_select(0, ids), self._initial(len(ids)), rows)
        return rows

    def _store(self, state: State, ids: Tensor | None) -> None:
        if ids is _ALL:
            self._state, self._fresh = state, torch.zeros_like(self._fresh)
            self._any_fresh, self._handed_out = False, False
        elif torch.compiler.is_compiling() or self._handed_out or self._is_inference():
            self._state = state_ops.tree_map(lambda s, new: s.index_copy(0, ids, new), self._state, state)
            self._fresh = self._fresh.index_fill(0, ids, False)
            self._handed_out = False
        else:
            state_ops.tree_map(lambda s, new: s.index_copy_(0, ids, new), self._state, state)
            self._fresh = self._fresh.index_fill(0, ids, False)

    def _is_inference(self) -> bool:
        return any(leaf.is_inference() for leaf in self._leaves())


def _reserve_while_tracing(number: str, batch: int) -> bool:
    """Runs while the compiler traces, not in the graph: a graph made for a memory without rows serves one call only."""
    memory = _memories[number]
    if batch > memory.num_envs and memory.num_envs == memory.num_rows:
        memory.reserve(batch)
    return True


_reserve_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in kernels/native.py


def _rows_of(state: State, default: int) -> int:
    """The batch size of `state`, which may be anything; `check_state` says what is wrong with it."""
    first = next((leaf for leaf in state_ops.leaves(state)), None)
    return int(first.shape[0]) if isinstance(first, Tensor) and first.dim() else default


def _without_graph(state: State) -> State:
    """Detached, and usable in backward even if it was made under `torch.inference_mode`."""
    if not torch.compiler.is_compiling() and any(leaf.is_inference() for leaf in state_ops.leaves(state)):
        with torch.inference_mode(False):
            return state_ops.clone(state)
    return state_ops.detach(state)
