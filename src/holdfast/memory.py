"""`Memory`: the states of many environments, one row each, addressed by environment id.

`write` detaches and copies; `read` gives a copy. A step of a policy (`take`, `put`) avoids copies: a write *replaces* stored
tensors that were handed out. Memory knows nothing about time, episodes or gradients. `state_rows.py` holds the rows,
`id_index.py` says which row an id has; an id costs one row, however large it is.

>>> import holdfast as hf
>>> core = hf.GRU(4, 8)
>>> memory = hf.Memory(core)
>>> memory.write(core.initial_state(2), [5, 10**12])
>>> memory.num_envs, memory.read([5, 7])["h"].shape      # 7 is unknown: a fresh row
(2, torch.Size([2, 1, 8]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.checks import as_env_ids
from holdfast.cores.base import Core
from holdfast.id_index import IdIndex, Ids
from holdfast.state import State
from holdfast.state_rows import StateRows, saved_parts

EnvIds = Tensor | Sequence[int] | slice | range | int | None


class Memory:
    """Rows of state for the environments of one core.

    Ids are non-negative integers. Ids on the host are checked, and rows are added as needed. Ids on a GPU, or under
    `torch.compile`, are not checked and must have been reserved (`reserve(n)`). max_envs: how many environments may be
    known at once. Not thread-safe; `hf.Runner` is.
    """

    _instead = "memory= for another set of environments"  # what a message offers next to env_ids=

    def __init__(self, core: Core, max_envs: int = 2**20) -> None:
        if not isinstance(core, Core):
            raise TypeError(
                f"Memory needs a core (hf.LSTM, ...), got a {type(core).__name__}; for a policy: policy.core"
            )
        self.core = core
        self.max_envs = max_envs
        self.rows = StateRows(core)
        self.index = IdIndex(self.rows)
        self.in_place = False
        """Whether `policy.act` may update the stored tensors; see `update_in_place`."""
        self.writes = 0
        """Write counter, to detect foreign writes. Compiled steps are not counted."""
        self.last_user: str | None = None
        """Who stored the states, if known; None after everything was reset, forgotten or loaded."""

    def __repr__(self) -> str:
        envs = f"{self.num_envs} environment{'s' * (self.num_envs != 1)}"
        return f"{type(self).__name__}({envs} of {type(self.core).__name__}({self.core.extra_repr()}))"

    @property
    def num_envs(self) -> int:
        """How many environments are known; each has one row."""
        return self.rows.count

    @property
    def num_rows(self) -> int:
        """`num_envs`."""
        return self.rows.count

    @property
    def env_ids(self) -> list[int]:
        """The ids of the known environments, ascending."""
        return sorted(cast(Sequence[int], self.index.ids()))

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
        if ids is None and self.index.dense:
            return state_ops.clone(self.rows.read_all())
        return self._read(self.env_ids if ids is None else ids)

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
        self._store(state_ops.clone(state_ops.without_graph(state)), ids, batch, shared=False)

    def reset(self, env_ids: EnvIds = None) -> None:
        """Reset rows; they stay known. None: all. Unknown ids are fresh already."""
        ids = self._checked(env_ids)
        if ids is None:
            self.rows.reset(None)
            self.last_user = None
        else:
            self.rows.reset(self.index.rows_of(ids))

    def forget(self, env_ids: EnvIds) -> None:
        """Drop environments and their rows; they are unknown afterwards, and fresh if they appear again. None: all."""
        self.index.remove(self._checked(env_ids))
        if self.num_envs == 0:
            self.last_user = None

    def reserve(self, num_envs: int) -> None:
        """Make ids 0..num_envs-1 known ahead of time; new ones are fresh."""
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 0:
            raise ValueError(f"reserve takes a number of environments, got {num_envs!r}")
        self.rows.follow_core()
        self._check_room(num_envs - self.num_envs if self.index.dense else len(self.index.unknown(range(num_envs))))
        self.index.reserve(num_envs)

    # --- one step of a policy: no copies that can be avoided ---------------------------------------------------------

    def update_in_place(self) -> None:
        """From now on `policy.act` for all rows may update the stored tensors (`Core.advance_`), which `take` gives.

        For the rollout that owns this memory: a large state, like a ring of keys, is then not copied in each step.
        """
        if self.core.supports_advance and not self.in_place:
            self.rows.follow_core()
            self.rows.unshare()  # from earlier snapshots
            self.in_place = True

    def expect(self, batch: int, env_ids: EnvIds) -> None:
        """Under the compiler: reserve the rows first, so that the first graph serves all later steps too."""
        if env_ids is None and torch.compiler.is_compiling():
            self._reserve_while_tracing(len(range(batch)))  # len(range()) makes a symbolic size a number

    def take(self, batch: int, env_ids: EnvIds = None) -> tuple[State, Any]:
        """The state of the `batch` environments that act now, and their ids as `put` takes them. Changes nothing.

        The state is read-only: it may be the stored tensors themselves.
        """
        ids = self._checked(env_ids)
        if ids is not None:
            if len(ids) != batch:
                raise ValueError(f"got {batch} observations with {len(ids)} env_ids; pass one id per row")
            return self._read(ids), ids
        if not (self.index.dense and batch >= self.rows.count):
            self._check_covers_all(batch)
        if not self.index.dense:
            return self._read(range(batch)), None
        state, new = self.rows.read_all(), batch - self.rows.count
        if new > 0:  # new environments: fresh rows after the known ones
            state = state_ops.tree_map(lambda s, n: torch.cat([s, n]), state, self.rows.initial(new))
        return state, None

    def put(self, state: State, env_ids: Ids | None) -> None:
        """Store the state that the core has just returned; it belongs to the memory from now on.

        Rows are added here and not in `take`, so that an error between the two leaves no trace.
        """
        # shared: a core may have returned a leaf that it was given, which an earlier snapshot holds too.
        self._store(state_ops.without_graph(state), env_ids, state_ops.batch_size(state) or 0, shared=True)

    # --- copies ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy as plain tensors and numbers, on the host. Rows are in id order; `ids` is there unless they are 0..n-1."""
        self.rows.follow_core()
        if self.index.dense:
            return self.rows.saved(None)
        ids = self.env_ids
        return {**self.rows.saved(self.index.rows_of(ids)), "ids": torch.tensor(ids)}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Restore a copy; refused as a whole if it is of another core."""
        ids, fresh, leaves = saved_parts(d, self.core)
        self.rows.load(fresh, leaves)
        self.index.load(ids)
        self.last_user = None

    # --- inside ----------------------------------------------------------------------------------------------------

    def _checked(self, env_ids: Any) -> Ids | None:
        """Ids as the index takes them, here a LongTensor [B]; None: all rows in order."""
        self.rows.follow_core()
        if env_ids is None:
            return None
        if isinstance(env_ids, slice) and env_ids.stop is None and not self.index.dense:
            first, step = env_ids.start or 0, env_ids.step or 1  # of the known ids alone: they may be far apart
            env_ids = [i for i in self.env_ids if i >= first and (i - first) % step == 0]
        ids = as_env_ids(env_ids, self.num_envs)
        if torch.compiler.is_compiling() and not self.index.dense:
            raise ValueError("a compiled step takes ids 0..n-1 that are reserved; call memory.reserve(n) first")
        return ids

    def _read(self, ids: Ids) -> State:
        return self.rows.read(self.index.rows_of(ids))

    def _store(self, state: State, ids: Ids | None, batch: int, shared: bool) -> None:
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.writes += 1
        if ids is not None:
            new = () if compiling else self.index.unknown(ids)
            if new:
                self._check_room(len(new))
                self.index.add(new)
            self.rows.write(self.index.rows_of(ids), state)
            return
        if batch > self.rows.count or not self.index.dense:
            self._check_covers_all(batch)
            self.reserve(batch)
        self.rows.replace_all(state, shared)

    def _check_room(self, new: int) -> None:
        if new > 0 and self.num_envs + new > self.max_envs:
            raise ValueError(
                f"{self.num_envs + new} environments are more than max_envs={self.max_envs}; forget() those that are "
                "gone, or raise it: Memory(core, max_envs=...)"
            )

    def _check_covers_all(self, batch: int) -> None:
        if not self.index.within(batch):
            others = [i for i in self.index.ids() if i not in range(batch)]
            known = f"ids 0..{self.num_envs - 1}" if self.index.dense else f"among them {others[0]!r}"
            raise ValueError(
                f"got {batch} row{'s' * (batch != 1)}, but this memory knows {self.num_envs} "
                f"environment{'s' * (self.num_envs != 1)} ({known}): pass env_ids=, or {self._instead}"
            )

    def _reserve_while_tracing(self, batch: int) -> bool:
        """Runs while the compiler traces, not in the graph: a graph made for a memory without rows serves one call."""
        if self.index.within(batch):
            self.reserve(batch)
        return True

    # As in kernels/cpu/recurrence.py: torch.compiler.assume_constant_result would import the whole compiler.
    _reserve_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
