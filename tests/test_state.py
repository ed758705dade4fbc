"""States are pytrees of batch-first tensors; these are the few things one can do with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from holdfast import state as state_ops
from holdfast.state import RowShape


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def tree():
    return {"x": (torch.arange(6.0).view(3, 2),), "y": Pair(torch.ones(3), [torch.zeros(3, 1, 2)])}


def test_every_container_keeps_its_type_and_order():
    doubled = state_ops.tree_map(lambda a, b: a + b, tree(), tree())
    assert isinstance(doubled["y"], Pair) and isinstance(doubled["y"].b, list) and isinstance(doubled["x"], tuple)
    assert torch.equal(doubled["x"][0], 2 * tree()["x"][0])
    assert list(state_ops.named_leaves(tree())) == ["x.0", "y.0", "y.1.0"]
    assert len(state_ops.leaves(tree())) == 3 and state_ops.leaves({}) == []


def test_rows_are_selected_in_order_and_copied():
    original = tree()
    chosen = state_ops.select(original, torch.tensor([2, 0]))
    assert chosen["x"][0].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    chosen["x"][0].zero_()
    assert original["x"][0].sum() == 15


def test_where_selects_and_a_nan_in_the_other_does_not_matter():
    mask = torch.tensor([True, False, True])
    other = state_ops.tree_map(lambda leaf: torch.full_like(leaf, float("nan")), tree())
    mixed = state_ops.where(mask, tree(), other)
    for leaf, original in zip(state_ops.leaves(mixed), state_ops.leaves(tree())):
        assert torch.equal(leaf[mask], original[mask]) and leaf[~mask].isnan().all()


def test_detach_clone_and_to():
    state = {"h": torch.ones(2, 3, requires_grad=True) * 2}
    assert not state_ops.detach(state)["h"].requires_grad
    assert state_ops.detach(state)["h"].data_ptr() == state["h"].data_ptr()
    assert state_ops.clone(state)["h"].data_ptr() != state["h"].data_ptr()
    assert state_ops.to(state, torch.float64)["h"].dtype == torch.float64
    assert state_ops.batch_size(state) == 2 and state_ops.batch_size({}) is None


def test_a_mismatch_is_named_by_its_path():
    rows = {"actor": {"h": RowShape((1, 4))}, "critic": (RowShape((2,)),)}
    device = torch.device("cpu")

    def what(state):
        return state_ops.mismatch(state, rows, 3, torch.float32, device)

    good = {"actor": {"h": torch.zeros(3, 1, 4)}, "critic": (torch.zeros(3, 2),)}
    assert what(good) is None
    assert "state['actor']: state['h']: shape (3, 1, 5), expected (3, 1, 4)" in what(
        {**good, "actor": {"h": torch.zeros(3, 1, 5)}}
    )
    assert "expected a dict with keys ['actor', 'critic']" in what({"actor": good["actor"]})
    assert "a tuple of 1 states" in what({**good, "critic": ()})
    assert "dtype torch.float64, expected torch.float32" in what({**good, "critic": (torch.zeros(3, 2).double(),)})
    assert "a NoneType, expected a tensor" in what({**good, "critic": (None,)})


def test_a_leaf_is_compared_with_and_converted_to_the_dtype_it_fixes():
    rows, device = {"h": RowShape((2,)), "age": RowShape((), torch.int32)}, torch.device("cpu")
    state = state_ops.convert({"age": [1.0, 2.0], "h": torch.ones(2, 2)}, rows, torch.float64, device)
    assert state["age"].dtype == torch.int32 and state["h"].dtype == torch.float64
    assert state_ops.mismatch(state, rows, 2, torch.float64, device) is None
    assert "state['age']: dtype torch.float64, expected torch.int32" in state_ops.mismatch(
        {**state, "age": state["age"].double()}, rows, 2, torch.float64, device
    )
    assert state_ops.structure_mismatch({"h": None, "age": "anything"}, rows) is None
    assert "keys ['h']" in state_ops.structure_mismatch({"h": None}, rows)


def test_paths_lead_to_the_leaves_and_leaves_make_a_tree_again():
    found = state_ops.paths(tree())
    assert [path for path, _ in found] == [("x", 0), ("y", 0), ("y", 1, 0)]
    again = state_ops.from_leaves([leaf for _, leaf in found], like=tree())
    assert isinstance(again["y"], Pair) and torch.equal(again["x"][0], tree()["x"][0])


def test_mapping_tensors_leaves_everything_else_as_it_is():
    doubled = state_ops.map_tensors(lambda x: x * 2, {"a": torch.ones(1), "b": (None, "text", 3)})
    assert doubled == {"a": torch.full((1,), 2.0), "b": (None, "text", 3)}


def test_rows_are_flattened_also_where_they_hold_one_number():
    assert state_ops.flat_rows(torch.zeros(3, 2, 4)).shape == (3, 8) and state_ops.flat_rows(torch.zeros(3)).shape == (
        3,
        1,
    )
