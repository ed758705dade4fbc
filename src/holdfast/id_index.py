"""`IdIndex`: which row of a `StateRows` each id has. It adds, moves and drops rows, and never looks into them.

Rows are numbered without gaps. While the ids are 0..n-1 each id is its own row (`dense`): there is no dict, and ids that lie on
a GPU or come through the compiler are used as rows as they are. An id is anything that can be a key of a dict.

>>> import holdfast as hf
>>> rows = StateRows(hf.GRU(4, 8))
>>> rows.follow_core()
>>> index = IdIndex(rows)
>>> index.add(range(3))
>>> index.dense, index.rows_of([2, 0])
(True, tensor([2, 0]))
>>> index.add(["alice"])
>>> index.dense, index.rows_of(["alice", "bob"])      # bob is unknown: there is no row 4
(False, tensor([3, 4]))
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from holdfast.checks import values_are_readable
from holdfast.state_rows import StateRows

Ids = Tensor | Sequence[Hashable]
"""Checked ids, each at most once: a LongTensor [B], or keys."""


class IdIndex:
    """Maps ids to the rows 0..rows.count-1."""

    def __init__(self, rows: StateRows) -> None:
        self.rows = rows
        self.dense = True
        """Whether the ids are 0..n-1 and each is its own row."""
        self._row_of: dict[Hashable, int] | None = None  # None: dense
        self._id_of: list[Hashable] = []  # the inverse of _row_of

    def ids(self) -> Sequence[Hashable]:
        """All ids, in the order in which they were added."""
        return range(self.rows.count) if self._row_of is None else list(self._row_of)

    def __contains__(self, key: Hashable) -> bool:
        return _is_number_below(key, self.rows.count) if self._row_of is None else key in self._row_of

    def rows_of(self, ids: Ids) -> Tensor:
        """The rows [B] of these ids. For an unknown id it is a row that does not exist."""
        count, row_of = self.rows.count, self._row_of
        if row_of is None:
            if isinstance(ids, Tensor):
                return ids
            rows = [hash(key) if _is_number_below(key, count) else count for key in ids]
        else:
            rows = [row_of.get(key, count) for key in _listed(ids)]
        return torch.tensor(rows, dtype=torch.long)

    def unknown(self, ids: Ids) -> Sequence[Hashable]:
        """Those of these ids that have no row."""
        if self._row_of is not None:
            return [key for key in _listed(ids) if key not in self._row_of]
        if isinstance(ids, Tensor):
            # More ids than rows on a GPU: some must be new, so the values are read.
            readable = values_are_readable(ids) or len(ids) > self.rows.count
            if len(ids) == 0 or not readable or int(ids.max()) < self.rows.count:
                return ()
        return [key for key in _listed(ids) if key not in self]

    def within(self, end: int) -> bool:
        """Whether all ids are among 0..end-1."""
        if self._row_of is None:
            return self.rows.count <= end
        return all(_is_number_below(key, end) for key in self._row_of)

    def add(self, new: Sequence[Hashable]) -> None:
        """Add a fresh row for each of these unknown ids. The ids stay dense if these are the next numbers, in any order."""
        if not len(new):
            return
        following = range(self.rows.count, self.rows.count + len(new))
        row_of = self._made_dict() if self._row_of is not None or set(new) != set(following) else None
        self.rows.grow(following.stop)
        if row_of is not None:
            row_of.update(zip(new, following))
            self._id_of += new

    def reserve(self, end: int) -> None:
        """Make ids 0..end-1 known, and the ids dense unless there are others too."""
        if self._row_of is None:
            if end > self.rows.count:
                self.rows.grow(end, exactly=True)
            return
        self.add(self.unknown(range(end)))
        if self.within(self.rows.count):
            self.rows.reorder([self._row_of[key] for key in range(self.rows.count)])
            self._row_of, self._id_of, self.dense = None, [], True

    def remove(self, ids: Ids | None) -> None:
        """Drop ids and their rows; the last rows move into the gaps. None: all. Unknown ids are ignored."""
        count = self.rows.count
        gone = list(range(count)) if ids is None else [row for row in self.rows_of(ids).tolist() if row < count]
        left = count - len(gone)
        if left == 0:
            self._row_of, self._id_of, self.dense = None, [], True
        elif self._row_of is not None or min(gone, default=left) < left:
            self._fill_gaps(gone, left)
        self.rows.shrink(left)

    def load(self, ids: Sequence[Hashable]) -> None:
        """The rows belong to these ids, in this order."""
        self._row_of, self._id_of, self.dense = None, [], True
        if list(ids) != list(range(len(ids))):
            self._row_of, self._id_of, self.dense = {key: row for row, key in enumerate(ids)}, list(ids), False

    def _fill_gaps(self, gone: list[int], left: int) -> None:
        row_of, dropped = self._made_dict(), set(gone)
        for row in gone:
            del row_of[self._id_of[row]]
        gaps = [row for row in gone if row < left]
        movers = [row for row in range(left, self.rows.count) if row not in dropped]
        for gap, mover in zip(gaps, movers):
            key = self._id_of[mover]
            self._id_of[gap], row_of[key] = key, gap
        del self._id_of[left:]
        self.rows.move(movers, gaps)

    def _made_dict(self) -> dict[Hashable, int]:
        if self._row_of is None:
            self._id_of = list(range(self.rows.count))
            self._row_of, self.dense = {row: row for row in range(self.rows.count)}, False
        return self._row_of


def _listed(ids: Ids) -> Sequence[Hashable]:
    return ids.tolist() if isinstance(ids, Tensor) else ids


def _is_number_below(key: Hashable, end: int) -> bool:
    """Whether a dict would take `key` for one of the integers 0..end-1. (To a dict 1, 1.0 and numpy's 1 are one key.)"""
    number = hash(key)
    return 0 <= number < end and key == number
