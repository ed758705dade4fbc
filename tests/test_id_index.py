"""IdIndex: any keys, rows without gaps, and no dict while the ids are 0..n-1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.id_index import IdIndex
from holdfast.state_rows import StateRows


def make_index():
    rows = StateRows(hf.GRU(2, 3))
    rows.follow_core()
    return IdIndex(rows)


def held(index):
    """What each id's row holds, a number that `mark` wrote."""
    ids = list(index.ids())
    return dict(zip(ids, index.rows.read(index.rows_of(ids))["h"][:, 0, 0].tolist()))


def mark(index, ids, value):
    index.rows.write(index.rows_of(ids), {"h": torch.full((len(ids), 1, 3), float(value))})


KEYS = [0, 1, 2, 3, -1, -2, 2**61 - 1, 2**70, 1.5, "a", ("room", 3), frozenset({1})]
"""hash(-1) is hash(-2), and hash(2**61 - 1) is 0."""


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_any_sequence_of_changes_keeps_each_row_with_its_id(data):
    index, model = make_index(), {}
    for value in range(1, data.draw(st.integers(1, 10)) + 1):
        keys = data.draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=4))
        change = data.draw(st.sampled_from(["add", "remove", "reserve", "load"]))
        if change == "add":
            new = index.unknown(keys)
            assert list(new) == [key for key in keys if key not in model]
            index.add(new)
            mark(index, keys, value)
            model.update(dict.fromkeys(keys, value))
        elif change == "remove":
            index.remove(keys)
            model = {key: number for key, number in model.items() if key not in keys}
        elif change == "reserve":
            index.reserve(3)
            model = {**dict.fromkeys(range(3), 0), **model}
        else:
            order = data.draw(st.permutations(list(model)))
            index.rows.reorder(index.rows_of(order).tolist())
            index.load(order)
        assert held(index) == model and index.rows.count == len(model)
        assert sorted(index.rows_of(list(model)).tolist()) == list(range(len(model))), "rows have no gaps"
        assert [key in index for key in KEYS] == [key in model for key in KEYS]
        assert index.within(4) == all(key in range(4) for key in model)


def test_ids_are_their_own_rows_as_long_as_they_are_the_next_numbers():
    index = make_index()
    index.add([1, 0])
    index.add([2])
    assert index.dense and index.rows_of(torch.tensor([2, 0])).tolist() == [2, 0]
    index.remove([2])
    assert index.dense, "the last ones went"
    index.remove([0])
    assert not index.dense and index.rows_of([1]).tolist() == [0]
    index.reserve(3)
    assert index.dense and list(index.ids()) == [0, 1, 2]
    index.add(["a"])
    assert not index.dense
    index.remove(None)
    assert index.dense and index.rows.count == 0


@pytest.mark.parametrize("dense", [True, False])
def test_numbers_that_a_dict_takes_for_one_key_are_one_id(dense):
    index = make_index()
    index.add([0, 1] if dense else ["a", 1])
    assert 1.0 in index and not index.unknown([1.0, 1])
    assert index.rows_of([1.0]).tolist() == index.rows_of([1]).tolist()
