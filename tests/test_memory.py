"""Memory: rows by id, snapshots that stay, fresh rows as marks, and errors that change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import holdfast as hf
from accumulator import DTYPES, Accumulator, dtypes
from holdfast import state as state_ops


def core(reset="zero"):
    return hf.LSTM(3, 4, num_layers=2, reset=reset)


def numbered(core, rows, offset=0):
    """A state whose row i holds i + 1 + offset everywhere, so that a reader sees whose it is."""
    values = torch.arange(rows, dtype=torch.float32) + 1 + offset
    return state_ops.tree_map(lambda r: values.view(-1, 1, 1).expand(-1, *r.shape).clone(), core.row_shapes())


def whose(state):
    """The number in each row; all leaves must agree."""
    columns = [leaf.flatten(1) for leaf in state_ops.leaves(state)]
    whole = torch.cat(columns, 1)
    assert (whole == whole[:, :1]).all()
    return whole[:, 0].tolist()


@pytest.fixture
def memory():
    memory = hf.Memory(core())
    memory.write(numbered(memory.core, 5))
    return memory


def test_rows_come_back_by_id_in_the_order_asked_for(memory):
    assert whose(memory.read()) == [1, 2, 3, 4, 5]
    for ids in ([4, 0, 2], torch.tensor([4, 0, 2]), np.array([4, 0, 2]), torch.tensor([4, 0, 2], dtype=torch.int32)):
        assert whose(memory.read(ids)) == [5, 1, 3]
    assert whose(memory.read(slice(1, 3))) == [2, 3]
    assert whose(memory.read(slice(3, None))) == [4, 5]
    assert whose(memory.read(range(4, -1, -2))) == [5, 3, 1]
    assert whose(memory.read(3)) == [4] and whose(memory.read(np.int64(3))) == [4]
    assert whose(memory.read([])) == []


def test_writing_some_rows_leaves_the_others(memory):
    memory.write(numbered(memory.core, 2, offset=10), [3, 1])
    assert whose(memory.read()) == [1, 12, 3, 11, 5]


def test_memory_grows_as_ids_appear_and_unknown_ones_read_as_fresh(memory):
    memory.write(numbered(memory.core, 1, offset=20), [8])
    assert memory.num_envs == memory.num_rows == 6 and memory.env_ids == [0, 1, 2, 3, 4, 8]
    assert whose(memory.read([8, 6, 100])) == [21, 0, 0]
    assert memory.num_envs == 6, "reading makes nothing known"
    assert whose(memory.read()) == [1, 2, 3, 4, 5, 21], "None: the known rows in id order"


def test_reserve_makes_rows_known_ahead_and_keeps_what_is_there(memory):
    memory.reserve(7)
    assert memory.num_envs == 7 and whose(memory.read()) == [1, 2, 3, 4, 5, 0, 0]
    memory.reserve(3)
    assert memory.num_envs == 7


def test_reset_makes_rows_fresh_and_keeps_them_known(memory):
    memory.reset([1, 3])
    assert whose(memory.read()) == [1, 0, 3, 0, 5] and memory.num_envs == 5
    memory.reset([99])
    assert memory.num_envs == 5, "an unknown id is fresh already"
    memory.reset()
    assert whose(memory.read()) == [0] * 5 and memory.num_envs == 5


def test_forget_makes_ids_unknown_and_fresh_if_they_come_back(memory):
    memory.forget([1, 4, 77])
    assert memory.num_envs == 3 and whose(memory.read()) == [1, 3, 4]
    assert whose(memory.read([1])) == [0]
    memory.write(numbered(memory.core, 1, offset=30), [1])
    assert memory.num_envs == 4 and whose(memory.read()) == [1, 31, 3, 4]
    memory.forget(None)
    assert memory.num_envs == 0 and memory.num_rows == 0


@pytest.mark.parametrize("ids", [None, [0, 2], slice(0, 3)], ids=["all", "some", "slice"])
def test_a_snapshot_does_not_change_whatever_happens_later(memory, ids):
    snapshot = memory.read(ids)
    before = whose(snapshot)
    memory.write(numbered(memory.core, 5, offset=50))
    memory.write(numbered(memory.core, 2, offset=60), [2, 0])
    memory.write(numbered(memory.core, 1, offset=70), [0])
    memory.reset([2])
    memory.reserve(20)
    memory.forget([0])
    memory.reset()
    assert whose(snapshot) == before


def test_replacing_a_leaf_of_a_snapshot_does_not_reach_into_memory(memory):
    memory.read()["h"] = None
    assert whose(memory.read()) == [1, 2, 3, 4, 5]


def test_a_write_copies_and_detaches(memory):
    state = numbered(memory.core, 5, offset=10)
    memory.write(state)
    for leaf in state.values():
        leaf.zero_()
    assert whose(memory.read()) == [11, 12, 13, 14, 15]
    some = numbered(memory.core, 1, offset=80)
    memory.write(some, [2])
    some["c"].zero_()
    assert whose(memory.read([2])) == [81]
    grown = state_ops.tree_map(lambda leaf: leaf.requires_grad_() * 2, numbered(memory.core, 5))
    memory.write(grown)
    assert all(not leaf.requires_grad for leaf in state_ops.leaves(memory.read()))


def test_a_core_that_passes_a_leaf_through_does_not_tie_memory_to_an_old_snapshot():
    memory = hf.Memory(core())
    memory.put(numbered(memory.core, 3), None)
    snapshot = memory.read()
    memory.put(memory.read(), None)  # the same tensors come back
    memory.write(numbered(memory.core, 1, offset=40), [1])
    assert whose(snapshot) == [1, 2, 3] and whose(memory.read()) == [1, 41, 3]


def test_a_fresh_row_is_a_mark_and_reads_as_the_current_learned_start():
    memory = hf.Memory(core("learned"))
    memory.write(numbered(memory.core, 3))
    memory.reset([1])
    with torch.no_grad():
        memory.core.initial_h.fill_(7.0)
        memory.core.initial_c.fill_(7.0)
    assert whose(memory.read()) == [1, 7, 3]
    assert whose(memory.read([9, 1])) == [7, 7]
    assert not memory.read()["h"].requires_grad


def test_memory_follows_its_core_to_another_dtype_and_keeps_its_numbers(memory):
    memory.core.double()
    state = memory.read()
    assert state["h"].dtype == torch.float64 and whose(state) == [1, 2, 3, 4, 5]


def test_a_snapshot_taken_under_inference_mode_can_be_trained_from(memory):
    with torch.inference_mode():
        memory.reserve(6)
        memory.write(numbered(memory.core, 1), [5])
        snapshots = memory.read(), memory.read([5, 0])
    for snapshot in snapshots:
        memory.core(torch.zeros(2, len(snapshot["h"]), 3), snapshot)[0].sum().backward()


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_any_sequence_of_operations_behaves_as_a_dictionary(data):
    memory, model, snapshots = hf.Memory(core()), {}, []
    ids = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 10**6, 2**40]), unique=True, max_size=4)
    for step in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["write", "reset", "forget", "reserve", "read", "step", "round trip"]))
        rows = data.draw(ids)
        if action == "write":
            memory.write(numbered(memory.core, len(rows), offset=10 * step), rows)
            model.update({env: i + 1 + 10 * step for i, env in enumerate(rows)})
        elif action == "reset":
            memory.reset(rows)
            model.update({env: 0 for env in rows if env in model})
        elif action == "forget":
            memory.forget(rows)
            for env in rows:
                model.pop(env, None)
        elif action == "reserve":
            memory.reserve(len(rows))
            model.update({env: 0 for env in range(len(rows)) if env not in model})
        elif action == "step":
            state, taken = memory.take(len(rows), rows)
            snapshots.append((state, [model.get(env, 0) for env in rows]))
            memory.put(numbered(memory.core, len(rows), offset=10 * step), taken)
            model.update({env: i + 1 + 10 * step for i, env in enumerate(rows)})
        elif action == "read":
            snapshots.append((memory.read(rows), [model.get(env, 0) for env in rows]))
        else:
            other = hf.Memory(memory.core)
            other.load_state_dict(memory.state_dict())
            memory = other
        assert memory.num_envs == len(model)
        assert whose(memory.read()) == [model[env] for env in sorted(model)]
    assert all(whose(snapshot) == expected for snapshot, expected in snapshots)


BAD_IDS = {
    "negative": ([0, -1], ValueError, "negative id -1"),
    "twice": ([1, 2, 1], ValueError, r"\[1\] more than once"),
    "a mask": (torch.tensor([True, False]), TypeError, r"torch.bool.*mask\.nonzero"),
    "floats": ([0.0, 1.0], TypeError, "float32, expected integers; hf.Runner takes any hashable key"),
    "words": (["a"], TypeError, "expected integers: .*; hf.Runner takes any hashable key"),
    "nothing": ([None], TypeError, "expected integers: .*; hf.Runner takes any hashable key"),
    "a matrix": (torch.zeros(2, 2, dtype=torch.long), ValueError, r"\(2, 2\), expected one dimension"),
}


@pytest.mark.parametrize("case", BAD_IDS)
@pytest.mark.parametrize("operation", ["read", "write", "reset", "forget"])
def test_bad_ids_are_refused_and_change_nothing(memory, case, operation):
    ids, error, words = BAD_IDS[case]
    before = memory.state_dict()
    with pytest.raises(error, match=words):
        memory.write(numbered(memory.core, 2), ids) if operation == "write" else getattr(memory, operation)(ids)
    assert_same(memory.state_dict(), before)


def test_bad_states_are_refused_and_change_nothing(memory):
    before = memory.state_dict()
    other = hf.GRU(3, 4)
    for bad in (None, "state", [], {}, {"h": torch.zeros(5, 2, 4)}, other.initial_state(5), numbered(memory.core, 4)):
        for ids in (None, [0, 1], [7, 8]):
            with pytest.raises(ValueError, match=r"does not fit|got 4 rows, but this memory knows 5"):
                memory.write(bad, ids)
    with pytest.raises(ValueError, match=r"batch of 3"):
        memory.write(numbered(memory.core, 2), [0, 1, 9])
    assert_same(memory.state_dict(), before)


def test_wrong_arguments_are_refused(memory):
    with pytest.raises(TypeError, match=r"policy\.core"):
        hf.Memory(torch.nn.LSTM(3, 4))
    for bad in (-1, 1.5, True, "4"):
        with pytest.raises(ValueError, match="reserve takes a number"):
            memory.reserve(bad)
    with pytest.raises(ValueError, match="max_envs"):
        memory.reserve(2**20 + 1)
    small = hf.Memory(memory.core, max_envs=3)
    small.write(numbered(memory.core, 3), [10, 2**40, 7])
    before = small.state_dict()
    with pytest.raises(ValueError, match=r"4 environments are more than max_envs=3; forget"):
        small.write(numbered(memory.core, 1), [8])
    assert_same(small.state_dict(), before)
    small.forget([10])
    small.write(numbered(memory.core, 1), [8])
    assert small.env_ids == [7, 8, 2**40]


def test_a_saved_memory_is_plain_data_and_a_copy_both_ways(memory):
    memory.reset([2])
    saved = memory.state_dict()
    flat = [saved["known"], saved["fresh"], *saved["leaves"]]
    assert isinstance(saved["num_rows"], int) and all(type(t) is Tensor for t in flat)
    memory.write(numbered(memory.core, 5, offset=90))
    other = hf.Memory(memory.core)
    other.load_state_dict(saved)
    for t in saved["leaves"]:
        t.zero_()
    assert whose(other.read()) == [1, 2, 0, 4, 5] and other.num_envs == 5


def stored_rows(memory):
    """Rows for which the memory holds storage, whatever it shows."""
    leaves = state_ops.leaves(memory.rows.state)
    return max(leaf.untyped_storage().nbytes() // (leaf[:1].numel() * leaf.element_size()) for leaf in leaves)


@pytest.mark.parametrize("huge", [10**6, 2**62])
def test_an_id_costs_one_row_however_large_it_is(memory, huge):
    memory.write(numbered(memory.core, 1, offset=10), [huge])
    assert memory.num_envs == 6 and stored_rows(memory) <= 12
    assert whose(memory.read([huge, 0])) == [11, 1] and whose(memory.read()) == [1, 2, 3, 4, 5, 11]
    saved = memory.state_dict()
    assert saved["num_rows"] == 6 and saved["ids"].tolist() == [0, 1, 2, 3, 4, huge]
    other = hf.Memory(memory.core)
    other.load_state_dict(saved)
    assert whose(other.read([huge, 3])) == [11, 4] and other.env_ids == memory.env_ids


def test_forgotten_environments_give_their_rows_back(memory):
    memory.reserve(1000)
    memory.write(numbered(memory.core, 1, offset=50), [999])
    memory.forget(range(1, 999))
    assert memory.env_ids == [0, 999] and whose(memory.read()) == [1, 51]
    assert memory.num_rows == 2 and stored_rows(memory) <= 4


def test_ids_that_come_one_by_one_do_not_copy_all_rows_each_time(monkeypatch):
    memory, copied, cat = hf.Memory(core()), [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *a: copied.append(len(parts[0])) or cat(parts, *a))
    for i in range(500):
        memory.write(numbered(memory.core, 1, offset=i), [7 * i])
    assert sum(copied) < 4 * 2 * 500, "each of three tensors is copied when its room is used up, which doubles"
    assert whose(memory.read([7, 7 * 499])) == [2, 500]


def test_a_memory_with_holes_becomes_dense_when_all_rows_are_given():
    memory = hf.Memory(core())
    memory.write(numbered(memory.core, 3), [2, 0, 3])
    assert whose(memory.take(5)[0]) == [2, 0, 1, 3, 0]
    with pytest.raises(ValueError, match=r"got 3 rows, but this memory knows 3 environments \(among them 3\)"):
        memory.take(3)
    memory.put(numbered(memory.core, 5, offset=20), None)
    assert memory.env_ids == [0, 1, 2, 3, 4] and whose(memory.read([4, 2])) == [25, 23]


def test_a_memory_of_the_first_version_with_holes_loads():
    ours, fresh = hf.Memory(core()), torch.tensor([False, True, True, False])
    state = numbered(ours.core, 4)
    known = torch.tensor([True, False, True, True])
    ours.load_state_dict({"num_rows": 4, "known": known, "fresh": fresh, "leaves": [state["h"], state["c"]]})
    assert ours.env_ids == [0, 2, 3] and whose(ours.read()) == [1, 0, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"known": torch.ones(4, dtype=torch.bool)},
        {"fresh": torch.zeros(5)},
        {"leaves": [1, 2]},
        {"ids": torch.tensor([0, 1, 2, 3, 3])},
        {"ids": torch.tensor([-1, 1, 2, 3, 4])},
        {"ids": [0, 1, 2, 3, 4]},
    ],
    ids=str,
)
def test_a_damaged_saved_memory_is_refused_whole(memory, change):
    before = memory.state_dict()
    with pytest.raises(ValueError, match=r"this memory is (damaged|of another core)"):
        memory.load_state_dict({**before, **change})
    assert_same(memory.state_dict(), before)


@pytest.mark.parametrize("ids", [None, [0, 2], slice(0, 3)], ids=["all", "some", "slice"])
@pytest.mark.parametrize("inference", [False, True])
def test_writing_into_a_snapshot_does_not_reach_into_memory(memory, ids, inference):
    memory.put(numbered(memory.core, 5), None)
    with torch.inference_mode(inference):
        snapshot = memory.read(ids)
        snapshot["h"][0] = 5.0
        snapshot["c"].zero_()
    assert whose(memory.read()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("bad", [None, {}, {"num_rows": 1}, [], hf.Memory(hf.GRU(3, 4)).state_dict()], ids=str)
def test_a_saved_memory_of_something_else_is_refused_whole(memory, bad):
    before = memory.state_dict()
    with pytest.raises(ValueError, match=r"expected what memory.state_dict\(\) returned|another core"):
        memory.load_state_dict(bad)
    assert_same(memory.state_dict(), before)


def assert_same(one, other):
    assert one["num_rows"] == other["num_rows"]
    for a, b in zip([one["known"], one["fresh"], *one["leaves"]], [other["known"], other["fresh"], *other["leaves"]]):
        assert torch.equal(a, b)


# --- leaves with a dtype of their own ---------------------------------------------------------------------------------


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def accumulating(request):
    """A memory of four environments that have acted 300 times."""
    core = Accumulator().to(request.param)
    memory = hf.Memory(core)
    for t in range(300):
        state, rows = memory.take(4)
        memory.put(core(torch.full((4, 4), float(t % 2), dtype=request.param), state)[1], rows)
    return memory


def test_every_leaf_is_stored_in_its_dtype_through_growth_resets_and_partial_writes(accumulating):
    expected = {**DTYPES, "last": accumulating.core.state_dtype()}
    accumulating.write(accumulating.core.initial_state(2), [6, 1])
    accumulating.reset([0])
    for state in (accumulating.read(), accumulating.read([3, 9, 0]), accumulating.take(7)[0]):
        assert dtypes(state) == expected
    assert accumulating.read([0, 1, 2, 3, 6])["age"].tolist() == [0, 0, 300, 300, 0]
    accumulating.forget([6])
    assert dtypes(accumulating.read()) == expected


def test_a_memory_that_follows_its_core_converts_only_leaves_that_fix_no_dtype(accumulating):
    accumulating.core.double()
    assert dtypes(accumulating.read()) == {**DTYPES, "last": torch.float64}
    assert accumulating.read()["age"].tolist() == [300] * 4 and (accumulating.read()["sum"] == 150).all()


def test_a_saved_memory_comes_back_with_every_dtype_and_number(accumulating, tmp_path):
    torch.save(accumulating.state_dict(), tmp_path / "memory.pt")
    other = hf.Memory(Accumulator().to(accumulating.core.state_dtype()))
    other.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    before, after = accumulating.read(), other.read()
    assert dtypes(after) == dtypes(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_slice_without_an_end_is_of_the_known_ids_however_far_apart_they_are():
    memory = hf.Memory(hf.GRU(2, 3))
    memory.write({"h": torch.ones(2, 1, 3)}, [4, 300_000_000])
    assert len(memory.read(slice(None))["h"]) == 2
    memory.reset(slice(5, None))
    assert [float(memory.read([i])["h"].sum()) for i in (4, 300_000_000)] == [3.0, 0.0]
    memory.forget(slice(None))
    assert memory.num_envs == 0
