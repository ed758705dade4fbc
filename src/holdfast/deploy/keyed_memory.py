"""`KeyedMemory`: the memory of a `Runner`. Ids are any keys of a dict, and the least recently used are forgotten.

The checks of what users pass as `env_ids` are here too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.cores.base import Core
from holdfast.memory import Memory
from holdfast.state_rows import saved_parts

_FIRST = 2**62  # in a saved memory: the number of the first id that is not a number itself


class KeyedMemory(Memory):
    """An `hf.Memory` whose ids are any keys. `use` forgets the least recently used of more than `max_envs`."""

    _instead = "forget() the others"

    def __init__(self, core: Core, max_envs: int) -> None:
        if isinstance(max_envs, bool) or not isinstance(max_envs, int) or max_envs < 1:
            raise ValueError(f"max_envs is {max_envs!r}, expected a number of environments, at least 1")
        super().__init__(core, max_envs)
        self.used: OrderedDict[Hashable, None] = OrderedDict()
        """The ids in use, least recently used first; also those whose state is not stored yet."""

    @property
    def env_ids(self) -> list[Any]:
        """The ids: integers ascending, then the others in the order in which they came."""
        ids = self.index.ids()
        return [*sorted(i for i in ids if isinstance(i, int)), *(i for i in ids if not isinstance(i, int))]

    def use(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Make these the most recently used. Forgets those that are too many, and returns them."""
        if len(keys) > self.max_envs:
            raise ValueError(f"got {len(keys)} environments at once, more than max_envs={self.max_envs}; raise it")
        for key in keys:
            self.used[key] = None
            self.used.move_to_end(key)
        gone = list(islice(self.used, max(len(self.used) - self.max_envs, 0)))
        if gone:
            self.forget(gone)
        return gone

    def forget(self, env_ids: Any) -> None:
        keys = self._checked(env_ids)
        super().forget(keys)
        for key in list(self.used) if keys is None else keys:
            self.used.pop(key, None)

    def _checked(self, env_ids: Any) -> list[Any] | None:
        """The ids of a batch, from a list, tuple, array, tensor, range or slice; None: all rows in order."""
        self.rows.follow_core()
        return None if env_ids is None else many_ids(env_ids, self)

    def state_dict(self) -> dict[str, Any]:
        """A copy. `names` maps the numbers in `ids` to the ids, least recently used first; absent if they are the same."""
        self.rows.follow_core()
        ids = self.env_ids
        number_of = dict(sorted(zip(ids, _numbers(ids)), key=lambda pair: pair[1]))
        saved = self.rows.saved(self.index.rows_of(list(number_of)))
        numbers = list(number_of.values())
        if numbers != list(range(len(numbers))):
            saved["ids"] = torch.tensor(numbers)
        order = [*(key for key in ids if key not in self.used), *(key for key in self.used if key in number_of)]
        names = {number_of[key]: key for key in order}
        plain = list(names) == numbers and all(number == key for number, key in names.items())
        return saved if plain else {**saved, "names": names}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Restore a copy. Of more environments than `max_envs`, the least recently used are forgotten."""
        numbers, fresh, leaves = saved_parts(d, self.core)
        names = d.get("names") or {number: number for number in numbers}
        if names.keys() != set(numbers):
            raise ValueError("this memory is damaged: 'names' does not name each of its ids")
        self.rows.load(fresh, leaves)
        self.index.load([names[number] for number in numbers])
        self.used = OrderedDict.fromkeys(names.values())
        self.use(())


def _numbers(ids: list[Any]) -> list[int]:
    """A number for each id: integers are their own if they fit, the others are counted from _FIRST on."""
    numbers, following = [], _FIRST
    for key in ids:
        own = isinstance(key, int) and 0 <= key < _FIRST
        numbers.append(key if own else following)
        following += not own
    return numbers


# --- what users pass as env_ids ------------------------------------------------------------------------------------------


def one_id(env_id: Any) -> Hashable:
    """The id of one environment."""
    if isinstance(env_id, (Tensor, np.ndarray)) and env_id.ndim == 0:
        env_id = env_id.item()
    if isinstance(env_id, np.integer):
        env_id = int(env_id)
    if isinstance(env_id, bool) or not isinstance(env_id, Hashable) or isinstance(env_id, (Tensor, slice)):
        raise ValueError(f"got one observation with env_ids={env_id!r}; pass the id of its environment")
    return env_id


def many_ids(env_ids: Any, memory: KeyedMemory) -> list[Any]:
    """The ids of a batch, from a list, tuple, array, tensor, range or slice. A slice without an end is of the known ids."""
    if isinstance(env_ids, slice):
        env_ids = _sliced(env_ids, memory)
    if isinstance(env_ids, (Tensor, np.ndarray)):
        if env_ids.ndim != 1 or str(env_ids.dtype).endswith("bool"):
            hint = "; a mask is not a list of ids: use mask.nonzero()" if str(env_ids.dtype).endswith("bool") else ""
            raise ValueError(f"env_ids have shape {tuple(env_ids.shape)} and dtype {env_ids.dtype}, expected [B]{hint}")
        env_ids = env_ids.tolist()
    if isinstance(env_ids, (str, bytes)) or not isinstance(env_ids, (list, tuple, range)):
        if isinstance(env_ids, int) and not isinstance(env_ids, bool):
            return [env_ids]
        raise TypeError(f"env_ids are {env_ids!r}, expected one id per environment: a list, array, range or slice")
    ids = [int(i) if isinstance(i, np.integer) else i for i in env_ids]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, Hashable) or isinstance(i, (Tensor, slice, type(None))):
            raise TypeError(f"env_ids hold {i!r}, expected ids that can be keys of a dict: numbers, strings, ...")
    if len(set(ids)) != len(ids):
        twice = sorted({str(i) for i in ids if ids.count(i) > 1})
        raise ValueError(f"env_ids hold {', '.join(twice)} more than once; one row per environment")
    return ids


def _sliced(wanted: slice, memory: KeyedMemory) -> list[Any]:
    """slice(None): all known ids. With a start and no end: those that are numbers from there on."""
    if wanted == slice(None):
        return memory.env_ids
    start, step = wanted.start or 0, wanted.step or 1
    if wanted.stop is not None:
        return list(range(start, wanted.stop, step))
    numbers = [env_id for env_id in memory.env_ids if isinstance(env_id, int)]
    inside = range(start, max(numbers, default=-1) + 1, step)
    return [env_id for env_id in numbers if env_id in inside]
