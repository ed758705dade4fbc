"""`hf.Block`: the formula, the state of the core inside, and the step in place."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from accumulator import Accumulator
from holdfast import state as state_ops

T, B = 7, 3


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 5), (4, 6)])
def test_a_block_is_a_residual_core_and_a_residual_mlp(inputs, outputs):
    block = hf.Block(hf.GRU(inputs, outputs), expansion=3)
    x, resets = torch.randn(T, B, inputs), torch.rand(T, B) < 0.3
    y, state = block(x, None, resets)
    inner, inner_state = block.core(block.norm(x), None, resets)
    skip = x if inputs == outputs else x @ block.skip.weight.T
    middle = skip + inner
    assert block.mlp[0].out_features == 3 * outputs
    torch.testing.assert_close(y, middle + block.mlp(block.mlp_norm(middle)))
    assert torch.equal(state["h"], inner_state["h"])


def test_a_block_starts_where_its_core_starts():
    block = hf.Block(hf.LSTM(4, 4, reset="learned"))
    torch.nn.init.ones_(block.core.initial_h)
    assert block.initial_state(B)["h"].unique().tolist() == [1.0]
    assert set(block.row_shapes()) == {"h", "c"}


def test_what_a_block_cannot_hold_is_refused():
    with pytest.raises(TypeError, match=r"Block takes cores.*Linear"):
        hf.Block(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="expansion must be a positive integer, got 0"):
        hf.Block(hf.GRU(3, 3), expansion=0)


MIXED = {
    "block": lambda: hf.Block(Accumulator()),
    "stack": lambda: hf.Stack([hf.GRU(4, 4), hf.Block(Accumulator())]),
    "parallel": lambda: hf.Parallel(a=hf.LSTM(4, 5), b=Accumulator(), c=hf.Memoryless(4)),
}


@pytest.mark.parametrize("name", MIXED)
def test_cores_made_of_cores_advance_in_place_if_one_of_them_does(name):
    core = MIXED[name]()
    pure, owned = core.initial_state(B), core.initial_state(B)
    places = [leaf.data_ptr() for leaf in state_ops.leaves(owned)]
    assert core.supports_advance
    for t in range(10):
        x, resets = torch.randn(B, 4), None if t == 3 else torch.rand(B) < 0.3
        with torch.no_grad():
            expected, pure = core(x, pure, resets)
            y = core.advance_(x, owned, resets)
        assert torch.equal(y, expected)
        assert all(map(torch.equal, state_ops.ordered_leaves(owned, pure), state_ops.leaves(pure)))
    assert [leaf.data_ptr() for leaf in state_ops.leaves(owned)] == places
