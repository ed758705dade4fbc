"""The environments a `Runner` knows, by whatever name the caller gives them, least recently used first.

`hf.Memory` keeps rows by number. An id that is a non-negative integer is its own number, any other gets one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

_FIRST = 2**62  # the numbers of ids that are not numbers themselves


class KnownEnvs:
    """Ids, their numbers in memory, and which of them to forget when there are more than `limit`."""

    def __init__(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"max_envs is {limit!r}, expected a number of environments, at least 1")
        self.limit = limit
        self._number: OrderedDict[Hashable, int] = OrderedDict()
        self._next = _FIRST

    def __len__(self) -> int:
        return len(self._number)

    def __contains__(self, env_id: Hashable) -> bool:
        return env_id in self._number

    def numbers(self, env_ids: Sequence[Hashable]) -> list[int]:
        """The numbers of these environments, also of those that are new. Changes nothing."""
        if len(env_ids) > self.limit:
            raise ValueError(f"got {len(env_ids)} environments at once, more than max_envs={self.limit}; raise it")
        numbers, following = [], self._next
        for env_id in env_ids:
            number = self._number.get(env_id)
            if number is None and isinstance(env_id, int) and 0 <= env_id < _FIRST:
                number = env_id
            elif number is None:
                number, following = following, following + 1
            numbers.append(number)
        return numbers

    def use(self, env_ids: Sequence[Hashable]) -> dict[Hashable, int]:
        """These environments are now the last used. Those that had to go for them, with their numbers."""
        for env_id, number in zip(env_ids, self.numbers(env_ids)):
            self._number[env_id] = number
            self._number.move_to_end(env_id)
            self._next = max(self._next, number + 1)
        return dict(self._number.popitem(last=False) for _ in range(len(self._number) - self.limit))

    def drop(self, env_ids: Iterable[Hashable]) -> list[int]:
        """Forget environments; the numbers of those that were known."""
        return [self._number.pop(env_id) for env_id in list(env_ids) if env_id in self._number]

    def clear(self) -> None:
        self._number.clear()

    def names(self) -> dict[int, Hashable]:
        """The ids by number, least recently used first."""
        return {number: env_id for env_id, number in self._number.items()}

    def ids(self) -> list[Hashable]:
        """All ids: numbers ascending, then the others as they came."""
        return sorted(self._number, key=self._number.__getitem__)

    def load(self, names: dict[int, Hashable]) -> list[int]:
        """What `names` gave. The numbers of those that are too many, which are not loaded: the least recently used."""
        self._number = OrderedDict((env_id, number) for number, env_id in names.items())
        self._next = max([_FIRST, *(number + 1 for number in names)])
        return [self._number.popitem(last=False)[1] for _ in range(len(self._number) - self.limit)]


def one_id(env_id: Any) -> Hashable:
    """The id of one environment."""
    if isinstance(env_id, (Tensor, np.ndarray)) and env_id.ndim == 0:
        env_id = env_id.item()
    if isinstance(env_id, np.integer):
        env_id = int(env_id)
    if isinstance(env_id, bool) or not isinstance(env_id, Hashable) or isinstance(env_id, (Tensor, slice)):
        raise ValueError(f"got one observation with env_ids={env_id!r}; pass the id of its environment")
    if isinstance(env_id, int) and env_id < 0:
        raise ValueError(f"got one observation with the negative id {env_id}")
    return env_id


def many_ids(env_ids: Any, known: KnownEnvs) -> list[Hashable]:
    """The ids of a batch, from a list, tuple, array, tensor, range or slice. A slice without an end is of the known ids."""
    if isinstance(env_ids, slice):
        env_ids = _sliced(env_ids, known)
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
        if isinstance(i, int) and i < 0:
            raise ValueError(f"env_ids hold the negative id {i}")
    if len(set(ids)) != len(ids):
        twice = sorted({str(i) for i in ids if ids.count(i) > 1})
        raise ValueError(f"env_ids hold {', '.join(twice)} more than once; one row per environment")
    return ids


def _sliced(wanted: slice, known: KnownEnvs) -> list[Hashable]:
    """slice(None): all known ids. With a start and no end: those that are numbers from there on."""
    if wanted == slice(None):
        return known.ids()
    start, step = wanted.start or 0, wanted.step or 1
    if wanted.stop is not None:
        return list(range(start, wanted.stop, step))
    numbers = [env_id for env_id in known.ids() if isinstance(env_id, int)]
    inside = range(start, max(numbers, default=-1) + 1, step)
    return [env_id for env_id in numbers if env_id in inside]
