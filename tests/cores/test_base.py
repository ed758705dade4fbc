"""What `Core` does for a cell: leaves with a dtype of their own, states from arrays, the step in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import holdfast as hf
from accumulator import DTYPES, Accumulator, dtypes
from holdfast import state as state_ops
from holdfast.cores import scan
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


class Written(hf.Core):
    """A cell as docs/own_memory.md writes one: what it computes says where it was reset."""

    def __init__(self, reset: str = "zero", size: int = 3):
        super().__init__()
        self.input_size = self.output_size = size
        self.reset = reset
        self.rate = torch.nn.Parameter(torch.full((size,), 0.5))
        self.fresh = torch.nn.Parameter(torch.ones(size))

    def row_shapes(self):
        return {"h": hf.RowShape((self.input_size,))}

    def initial_rows(self):
        return {"h": self.fresh}

    def step(self, x, state):
        h = self.rate * state["h"] + x
        return h, {"h": h}


class Scan(Written):
    def sequence(self, x, state, resets):
        h, last = hf.linear_recurrence(self.rate, x, state["h"], resets, self.fresh)
        return h, {"h": last}


class ScanAlone(Scan):
    step = hf.Core.step


X, RESETS = torch.arange(12.0).view(4, 1, 3), torch.tensor([[False], [False], [True], [False]])


@pytest.mark.parametrize("kind", [Written, Scan, ScanAlone])
def test_a_written_step_or_sequence_starts_from_a_reset_state(kind):
    core = kind()
    y, state = core(X, None, RESETS)
    by_hand = [0.5 + X[0], 0.5 * (0.5 + X[0]) + X[1], 0.5 + X[2], 0.5 * (0.5 + X[2]) + X[3]]
    torch.testing.assert_close(y, torch.stack(by_hand))
    steps, again = [], core.initial_state(1)
    for x, flags in zip(X, RESETS):
        one, again = core(x, again, flags)
        steps.append(one)
    assert torch.equal(torch.stack(steps), y) and torch.equal(again["h"], state["h"])
    y.detach().zero_()  # what a caller does with outputs does not reach the state
    steps[-1].detach().zero_()
    assert state["h"].all() and again["h"].all()


def test_the_reset_mode_of_a_written_step_is_one_attribute():
    gradients = {}
    for mode in ("zero", "detach", "never"):
        core, x = Written(mode), X.clone().requires_grad_()
        y, _ = core(x, None, RESETS)
        gradients[mode] = torch.autograd.grad(y[2:].sum(), x)[0][:2].abs().sum()
        assert torch.equal(y, Written("never")(X)[0]) == (mode != "zero")
    assert gradients["never"] > 0 == gradients["zero"] == gradients["detach"]


def test_a_nan_does_not_survive_the_reset_of_a_written_step():
    y, state = Written()(X, {"h": torch.full((1, 3), torch.nan)}, RESETS)
    assert y[:2].isnan().all() and y[2:].isfinite().all() and state["h"].isfinite().all()


def test_a_core_without_a_step_says_what_to_write():
    with pytest.raises(NotImplementedError, match="write step"):
        type("Empty", (Written,), {"step": hf.Core.step})()(X)


@pytest.mark.parametrize("steps", [4, 3])
def test_compiled_steps_compute_what_steps_do(steps, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compile(fn, backend="eager", **options))
    scan._compiled.cache_clear()
    core, plain = Written(), Written()
    core.compiled_steps = 2
    x, resets = torch.randn(steps, 1, 3), RESETS[:steps]
    (y, _), (expected, _) = core(x, None, resets), plain(x, None, resets)
    assert torch.equal(y, expected)
    for out in (y, expected):
        out.sum().backward()
    assert torch.equal(core.fresh.grad, plain.fresh.grad)
    scan._compiled.cache_clear()


def test_where_nothing_can_be_compiled_the_loop_runs_and_says_so_once(monkeypatch):
    def compile(fn, **options):
        def fails(*args):
            raise RuntimeError("no C++ compiler\nmore")

        return fails

    monkeypatch.setattr(torch, "compile", compile)
    scan._compiled.cache_clear()
    core = Written()
    core.compiled_steps = 2
    with pytest.warns(UserWarning, match="Written run uncompiled: no C\\+\\+ compiler$") as warned:
        y, _ = core(X, None, RESETS)
        core(X, None, RESETS)
    assert len(warned) == 1 and torch.equal(y, Written()(X, None, RESETS)[0])
    scan._compiled.cache_clear()
