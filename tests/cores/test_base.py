"""What `Core` does for a cell: leaves with a dtype of their own, states from arrays, the step in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import holdfast as hf
from accumulator import DTYPES, Accumulator, dtypes
from holdfast import state as state_ops
from holdfast.state import RowShape

B = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_leaf_keeps_the_dtype_it_fixes_whatever_the_modules(dtype):
    core = Accumulator().to(dtype)
    expected = {**DTYPES, "last": dtype}
    assert dtypes(core.initial_state(B)) == expected
    y, state = core(torch.randn(5, B, 4, dtype=dtype), None, torch.rand(5, B) < 0.3)
    assert y.dtype == dtype and dtypes(state) == expected
    core(torch.randn(B, 4, dtype=dtype), state)


def test_a_count_beyond_what_bfloat16_holds_stays_exact():
    core = Accumulator().bfloat16()
    _, state = core(torch.ones(300, B, 4, dtype=torch.bfloat16))  # bfloat16 ends at 256 + 1
    assert state["age"].tolist() == [300] * B and (state["sum"] == 300).all()


def test_a_leaf_in_another_dtype_than_its_own_is_refused():
    core, x = Accumulator().bfloat16(), torch.zeros(B, 4, dtype=torch.bfloat16)
    for name, wrong in (("age", torch.int64), ("sum", torch.bfloat16), ("last", torch.float32)):
        state = core.initial_state(B)
        state[name] = state[name].to(wrong)
        with pytest.raises(ValueError, match=rf"state\['{name}'\]: dtype {wrong}, expected"):
            core(x, state)


def test_a_learned_start_is_given_in_the_leafs_dtype_and_is_trained():
    class Learned(Accumulator):
        def __init__(self):
            super().__init__()
            self.start = torch.nn.Parameter(torch.zeros(4))

        def initial_rows(self):
            return {"sum": self.start, "age": torch.tensor(0), "last": torch.zeros(4, dtype=self.start.dtype)}

    core = Learned().bfloat16()
    state = core.initial_state(B)
    assert dtypes(state) == {**DTYPES, "last": torch.bfloat16}
    y, _ = core(torch.zeros(B, 4, dtype=torch.bfloat16), state)
    y.sum().backward()
    assert core.start.grad.tolist() == [B] * 4


def test_arrays_become_a_state_with_each_leaf_in_its_dtype():
    core = Accumulator().bfloat16()
    arrays = {"last": np.ones((B, 4)), "age": np.full(B, 7), "sum": np.ones((B, 4), np.float16)}  # any order
    state = core.as_state(arrays, B)
    assert dtypes(state) == {**DTYPES, "last": torch.bfloat16} and state["age"].tolist() == [7] * B
    with pytest.raises(ValueError, match=r"expected a dict with keys \['age', 'last', 'sum'\]"):
        core.as_state({"age": np.zeros(B)}, B)
    with pytest.raises(ValueError, match=r"state\['age'\]: shape \(2,\), expected \(3,\)"):
        core.as_state({**arrays, "age": np.zeros(2)}, B)


def test_cores_made_of_cores_keep_the_dtypes_of_their_parts():
    core = hf.Stack([hf.GRU(4, 4), hf.Parallel(a=Accumulator(), b=hf.Memoryless(4))]).bfloat16()
    state = core.initial_state(B)
    expected = {"0.h": torch.bfloat16, "1.a.last": torch.bfloat16}
    assert dtypes(state) == {**expected, **{f"1.a.{name}": dtype for name, dtype in DTYPES.items()}}
    _, after, states = core.trace(torch.randn(6, B, 4).bfloat16(), state, torch.rand(6, B) < 0.3)
    assert dtypes(after) == dtypes(states) == dtypes(state)


# --- the step in place ------------------------------------------------------------------------------------------------


def test_advancing_a_state_in_place_equals_the_pure_step():
    core, generator = Accumulator(), torch.Generator().manual_seed(0)
    pure, owned = core.initial_state(B), core.initial_state(B)
    places = [leaf.data_ptr() for leaf in state_ops.leaves(owned)]
    for t in range(20):
        x = torch.randn(B, 4, generator=generator)
        resets = None if t % 5 == 0 else torch.rand(B, generator=generator) < 0.3
        with torch.no_grad():
            expected, pure = core(x, pure, resets)
            y = core.advance_(x, owned, resets)
        assert torch.equal(y, expected)
        assert all(torch.equal(owned[name], pure[name]) for name in pure)
    assert [leaf.data_ptr() for leaf in state_ops.leaves(owned)] == places, "the tensors that were given"


def test_a_core_without_a_step_in_place_says_so():
    for core in (hf.LSTM(4, 5), hf.GRU(4, 5), hf.Memoryless(4), hf.Stack([hf.LSTM(4, 5)])):
        assert not core.supports_advance
        with pytest.raises(NotImplementedError, match="has no in-place step"):
            core.advance_(torch.zeros(B, 4), core.initial_state(B), None)


def test_row_shapes_without_a_dtype_are_as_before():
    assert RowShape((2, 3)) == RowShape((2, 3), None) and RowShape((2,)).dtype is None
