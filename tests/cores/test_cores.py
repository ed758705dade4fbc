"""Cores are pure: a step, a sequence and any chunking of it are one function, in every reset mode."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from conformance.episodes import quick
from conformance.policies import loud
from cores.all_cores import CONFORMING, KINDS, KINDS_AND_RESETS, core_of, kinds_with, leaf_dtypes, returned_state
from holdfast import state as state_ops

SIZE = 6


def make(kind, reset, **options):
    torch.manual_seed(0)
    core = core_of(kind, reset, SIZE)
    for module in core.modules():
        for name, value in options.items():
            if hasattr(module, name):
                setattr(module, name, value)
    return loud(core)


def assert_states_close(got, expected, atol=1e-5):
    for mine, other in zip(state_ops.leaves(got), state_ops.leaves(expected)):
        torch.testing.assert_close(mine, other, atol=atol, rtol=0)


# "auto" is the C kernel, or the portable one for cells that C has not.
CHUNKED = [(*case, "auto") for case in KINDS_AND_RESETS]
CHUNKED += [(*case, "portable") for case in CONFORMING if case[0] in ("lstm", "gru", "mingru", "lru", "ffm")]


@pytest.mark.parametrize(("kind", "reset", "kernel"), CHUNKED)
@quick
@given(
    T=st.integers(1, 7),
    B=st.integers(1, 3),
    p=st.sampled_from([0.0, 0.3, 1.0]),
    cuts=st.sets(st.integers(1, 6)),
    seed=st.integers(0, 99),
)
def test_any_chunking_gives_the_same_outputs_and_final_state(kind, reset, kernel, T, B, p, cuts, seed):
    core = make(kind, reset, kernel=kernel)
    generator = torch.Generator().manual_seed(seed)
    x, resets = torch.randn(T, B, SIZE, generator=generator), torch.rand(T, B, generator=generator) < p
    start = returned_state(core, B)
    y, final = core(x, start, resets)
    state, parts = start, []
    for a, b in pairwise([0, *sorted(c for c in cuts if c < T), T]):
        part, state = core(x[a:b], state, resets[a:b])
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts), y, atol=1e-5, rtol=0)
    assert_states_close(state, final)
    for grad in (True, False):  # step by step: by torch's cell with gradients, by a step kernel without
        state, steps = start, []
        with torch.set_grad_enabled(grad):
            for t in range(T):
                step, state = core(x[t], state, resets[t])
                steps.append(step)
        torch.testing.assert_close(torch.stack(steps), y, atol=1e-5, rtol=0)
        assert_states_close(state, final)


@pytest.mark.parametrize(("kind", "reset"), KINDS_AND_RESETS)
def test_gradients_of_steps_and_of_the_sequence_agree(kind, reset):
    core = make(kind, reset).double()
    T, B = 5, 3
    x, resets = torch.randn(T, B, SIZE, dtype=torch.float64), torch.rand(T, B) < 0.4
    start = returned_state(core, B)

    def grads(run):
        core.zero_grad()
        inputs = x.clone().requires_grad_()
        state = state_ops.tree_map(lambda leaf: leaf.clone().requires_grad_(leaf.is_floating_point()), start)
        y, final = run(inputs, state)
        (y.square().sum() + sum(leaf.sum() for leaf in state_ops.leaves(final))).backward()
        return [inputs.grad, *[leaf.grad for leaf in state_ops.leaves(state)], *[p.grad for p in core.parameters()]]

    def steps(inputs, state):
        ys = []
        for t in range(T):
            y, state = core(inputs[t], state, resets[t])
            ys.append(y)
        return torch.stack(ys), state

    # Where a state is float32 in every module, so are the gradients: the tolerance is assert_close's for that dtype.
    single = torch.float32 in leaf_dtypes(core, torch.float64)
    tolerance = {"rtol": 1.3e-6, "atol": 1e-5} if single else {}
    for one, other in zip(grads(lambda i, s: core(i, s, resets)), grads(steps)):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize(("kind", "reset"), KINDS_AND_RESETS)
@pytest.mark.parametrize("leg", ["sequence", "steps"])
def test_a_reset_does_what_its_mode_says(kind, reset, leg):
    """One core of each family goes through the whole conformance suite in every mode; this is for all of them."""
    core, (T, B, edge) = make(kind, reset), (6, 3, 3)
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[edge, 0] = True

    def run(x, start, resets):
        if leg == "sequence":
            return core(x, start, resets)
        ys, state = [], start
        for x_t, resets_t in zip(x, resets):
            y, state = core(x_t, state, resets_t)
            ys.append(y)
        return torch.stack(ys), state

    x = torch.randn(T, B, SIZE, requires_grad=True)
    start = state_ops.tree_map(
        lambda leaf: leaf.requires_grad_() if leaf.is_floating_point() else leaf, returned_state(core, B)
    )
    y, final = run(x, start, resets)
    unflagged, unflagged_final = run(x, start, torch.zeros_like(resets))
    starts = [leaf for leaf in state_ops.leaves(start) if leaf.is_floating_point()]
    d_x, *d_start = torch.autograd.grad(y[edge:, 0].square().sum(), [x, *starts], allow_unused=True)
    crossed = float(d_x[:edge, 0].abs().sum()) + sum(float(d[0].abs().sum()) for d in d_start if d is not None)
    if reset in ("zero", "learned"):
        fresh, fresh_final = run(x[edge:], core.initial_state(B), torch.zeros_like(resets[edge:]))
        torch.testing.assert_close(y[edge:, 0], fresh[:, 0], atol=1e-5, rtol=0)
        assert (y[edge:, 0] - unflagged[edge:, 0]).abs().max() > 1e-3
        for mine, other in zip(state_ops.leaves(final), state_ops.leaves(fresh_final)):
            torch.testing.assert_close(mine[0], other[0], atol=1e-5, rtol=0)
    else:
        torch.testing.assert_close(y, unflagged, atol=1e-5, rtol=0)
        assert_states_close(final, unflagged_final)
    assert crossed > 0 if reset == "never" else crossed == 0
    torch.testing.assert_close(y[:, 1:], unflagged[:, 1:], atol=1e-5, rtol=0)  # the other environments


@pytest.mark.parametrize("kind", KINDS)
def test_no_environments_are_an_empty_batch(kind):
    core, x = make(kind, "zero"), torch.zeros(4, 0, SIZE, requires_grad=True)
    y, state = core(x, core.initial_state(0), torch.zeros(4, 0, dtype=torch.bool))
    y.sum().backward()
    assert y.shape == (4, 0, core.output_size) and core(x[0], state)[0].shape == (0, core.output_size)


@pytest.mark.parametrize(("kind", "reset"), KINDS_AND_RESETS)
def test_no_state_is_the_initial_state_and_no_resets_are_none(kind, reset):
    core = make(kind, reset)
    x = torch.randn(4, 3, SIZE)
    y, final = core(x)
    for state, resets in ((core.initial_state(3), None), (None, torch.zeros(4, 3, dtype=torch.bool))):
        other, other_final = core(x, state, resets)
        assert torch.equal(y, other)
        assert_states_close(final, other_final, atol=0)


@pytest.mark.parametrize(("kind", "reset"), [*KINDS_AND_RESETS, ("block of window", "zero")])
@pytest.mark.parametrize("resets", [True, False])
def test_an_output_alone_is_that_of_the_call_with_its_gradients(kind, reset, resets):
    core = hf.Block(make("window", reset)) if kind == "block of window" else make(kind, reset)
    x, state = torch.randn(9, 3, SIZE, requires_grad=True), returned_state(core, 3)
    flags = torch.rand(9, 3) < 0.3 if resets else None
    for at in (slice(None), 4):
        given = x[at], state, None if flags is None else flags[at]
        (expected, _), (got,) = core(*given), core.output_unchecked(*given)
        assert torch.equal(got, expected)
        leaves = [x, *core.parameters()]
        gradients = [torch.autograd.grad(y.square().sum(), leaves, allow_unused=True) for y in (expected, got)]
        for one, other in zip(*gradients):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


@pytest.mark.parametrize(("kind", "reset"), KINDS_AND_RESETS)
def test_a_core_keeps_nothing_and_changes_nothing_it_was_given(kind, reset):
    core = make(kind, reset)
    x, state, resets = torch.randn(4, 3, SIZE), returned_state(core, 3), torch.rand(4, 3) < 0.5
    copies = x.clone(), state_ops.clone(state)
    first, _ = core(x, state, resets)
    second, _ = core(x, state, resets)
    with torch.no_grad():
        core(x[0], state, resets[0])
    assert torch.equal(first, second) and torch.equal(x, copies[0])
    assert_states_close(state, copies[1], atol=0)


@pytest.mark.parametrize(("kind", "reset"), KINDS_AND_RESETS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batch", [3, 1])
def test_what_a_step_returns_shares_no_storage(kind, reset, grad, batch):
    """A decoder may work in place on the features; the state that memory keeps must not notice."""
    core = make(kind, reset)
    with torch.set_grad_enabled(grad):
        start = returned_state(core, batch)
        y, state = core(torch.randn(batch, SIZE), start, torch.tensor([True, False, False][:batch]))
    storages = [t.untyped_storage().data_ptr() for t in (y, *state_ops.leaves(state), *state_ops.leaves(start))]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_initial_state_follows_the_modules_dtype(kind, dtype):
    core = make(kind, KINDS[kind].resets[0]).to(dtype)
    expected = leaf_dtypes(core, dtype)
    assert [leaf.dtype for leaf in state_ops.leaves(core.initial_state(2))] == expected
    y, state = core(torch.randn(3, 2, SIZE).to(dtype))
    assert y.dtype == dtype and [leaf.dtype for leaf in state_ops.leaves(state)] == expected


@pytest.mark.parametrize("kind", kinds_with("learned"))
def test_a_learned_start_is_trained_through_the_initial_state_and_through_resets(kind):
    core = make(kind, "learned")
    starts = [p for name, p in core.named_parameters() if "initial_" in name]
    x, resets = torch.randn(4, 2, SIZE), torch.zeros(4, 2, dtype=torch.bool)
    core(x, core.initial_state(2))[0].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in starts)
    core.zero_grad()
    resets[2, 1] = True
    core(x, returned_state(core, 2), resets)[0].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in starts)


BAD_INPUT = {
    "no tensor": (lambda: [[0.0] * SIZE], TypeError, "list.*expected a tensor"),
    "rank 1": (lambda: torch.zeros(SIZE), ValueError, r"\(6,\).*\[T, B, 6\]"),
    "rank 4": (lambda: torch.zeros(2, 2, 2, SIZE), ValueError, r"\[T, B, 6\]"),
    "features": (lambda: torch.zeros(2, 3, SIZE + 1), ValueError, r"\(2, 3, 7\).*\[T, B, 6\]"),
    "no steps": (lambda: torch.zeros(0, 3, SIZE), ValueError, "T = 0"),
    "dtype": (lambda: torch.zeros(2, 3, SIZE, dtype=torch.float64), TypeError, "float32.*float64.*autocast"),
    "integers": (lambda: torch.zeros(2, 3, SIZE, dtype=torch.long), TypeError, "int64"),
    "device": (lambda: torch.zeros(2, 3, SIZE, device="meta"), ValueError, r"cpu.*meta.*\.to"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", BAD_INPUT)
def test_wrong_input_is_refused_with_what_came_and_what_was_expected(kind, case):
    build, error, words = BAD_INPUT[case]
    with pytest.raises(error, match=words):
        make(kind, "zero")(build())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_core_or_batch_size_is_refused(kind):
    core = make(kind, "zero")
    others = [
        core.initial_state(2),
        core.initial_state(4),
        hf.LSTM(SIZE, 50).initial_state(3),
        None,
        (),
        {},
        [1.0],
        "x",
    ]
    others += [state_ops.to(core.initial_state(3), torch.float64), state_ops.to(core.initial_state(3), "meta")]
    for state in others:
        if state is None:
            continue
        with pytest.raises(ValueError, match=r"does not fit.*batch of 3"):
            core(torch.zeros(2, 3, SIZE), state)


def test_the_layers_of_a_state_must_be_the_cores():
    with pytest.raises(ValueError, match=r"state\['h'\].*\(3, 1, 5\), expected \(3, 2, 5\)"):
        hf.GRU(SIZE, 5, 2)(torch.zeros(2, 3, SIZE), hf.GRU(SIZE, 5, 1).initial_state(3))


@pytest.mark.parametrize("cell", [hf.LSTM, hf.GRU])
def test_wrong_options_are_refused(cell):
    with pytest.raises(ValueError, match=r"unknown reset mode 'zeros'.*'zero', 'learned', 'detach', 'never'"):
        cell(3, 4, reset="zeros")
    with pytest.raises(ValueError, match="hidden_size must be a positive integer, got 0"):
        cell(3, 0)
    with pytest.raises(ValueError, match=r"num_layers must be a positive integer, got 1\.5"):
        cell(3, 4, 1.5)
    with pytest.raises(ValueError, match="unknown kernel 'quick'"):
        cell(3, 4, kernel="quick")


@pytest.mark.parametrize("cell", [hf.LSTM, hf.GRU, hf.MinGRU, hf.LRU, hf.FFM, hf.MLSTM, hf.WindowAttention])
def test_an_unknown_precision_or_reset_mode_is_refused_by_every_cell(cell):
    with pytest.raises(ValueError, match="unknown precision 'quick'; 'fast' or 'exact'"):
        cell(3, 8, precision="quick")
    with pytest.raises(ValueError, match="unknown reset mode 'zeros'"):
        cell(3, 8, reset="zeros")


def test_stack_and_parallel_say_what_does_not_fit():
    with pytest.raises(ValueError, match="core 0 gives 4 features, core 1 takes 5"):
        hf.Stack([hf.LSTM(3, 4), hf.GRU(5, 4)])
    with pytest.raises(ValueError, match="at least one core"):
        hf.Stack([])
    with pytest.raises(TypeError, match=r"Stack takes cores.*Linear"):
        hf.Stack([torch.nn.Linear(3, 3)])
    with pytest.raises(ValueError, match=r"input sizes differ.*3.*5"):
        hf.Parallel(actor=hf.LSTM(3, 4), critic=hf.GRU(5, 4))
    with pytest.raises(ValueError, match="at least one core"):
        hf.Parallel()


def test_a_residual_stack_adds_inputs_where_sizes_agree():
    torch.manual_seed(0)
    inner, last = hf.GRU(4, 4), hf.GRU(4, 3)
    x = torch.randn(5, 2, 4)
    hidden = x + inner(x)[0]
    assert torch.equal(hf.Stack([inner, last], residual=True)(x)[0], last(hidden)[0])
    assert torch.equal(hf.Stack([inner, last])(x)[0], last(inner(x)[0])[0])


def test_parallel_lays_outputs_side_by_side_and_names_states():
    core = hf.Parallel(actor=hf.LSTM(4, 3), critic=hf.GRU(4, 2))
    y, state = core(torch.randn(5, 2, 4))
    assert y.shape == (5, 2, 5) and core.slices == {"actor": slice(0, 3), "critic": slice(3, 5)}
    assert set(state) == {"actor", "critic"} and set(state["actor"]) == {"h", "c"}


class Counter(hf.Core):
    """Counts the steps of the episode."""

    def __init__(self):
        super().__init__()
        self.input_size = self.output_size = 1

    def row_shapes(self):
        return {"steps": state_ops.RowShape((1,))}

    def _step(self, x, state, resets):
        steps = state["steps"] if resets is None else state["steps"].masked_fill(resets.view(-1, 1), 0.0)
        steps = steps + 1
        return steps.clone(), {"steps": steps}


def test_a_new_cell_is_a_few_lines():
    core = hf.Stack([Counter(), Counter()])
    resets = torch.tensor([False, False, True, False]).view(4, 1)
    assert core(torch.zeros(4, 1, 1), None, resets)[0].flatten().tolist() == [1.0, 2.0, 1.0, 2.0]
    memory = hf.Memory(core)
    memory.write(core(torch.zeros(3, 2, 1))[1])
    assert memory.read([1])[0]["steps"].item() == 3.0


@pytest.mark.parametrize("make", [lambda: hf.Memoryless(3), lambda: hf.Stack([Counter(), Counter()]), Counter])
def test_a_core_without_parameters_follows_its_module(make: Any):
    core = make()
    assert core.dtype_and_device() == (torch.float32, torch.device("cpu"))
    policy = torch.nn.ModuleDict({"actor": hf.Parallel(actor=core, critic=make())}).double()
    assert core.dtype_and_device() == (torch.float64, torch.device("cpu"))
    for leaf in state_ops.leaves(core.initial_state(2)):
        assert leaf.dtype == torch.float64
    policy.to("meta")
    assert core.device() == torch.device("meta") and copy.deepcopy(policy)["actor"].device() == torch.device("meta")


@pytest.mark.parametrize("make", [lambda: hf.Memoryless(3), Counter])
def test_a_core_without_parameters_is_where_it_was_made(make: Any):
    with torch.device("meta"):
        core = make()
    assert core.device() == torch.device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        core = make()
    finally:
        torch.set_default_dtype(torch.float32)
    assert core.state_dtype() == torch.float64


@pytest.mark.parametrize("core_class", [hf.LSTM, hf.GRU])
def test_shapes_can_be_computed_on_the_meta_device(core_class: type):
    core = core_class(3, 4, 2).to("meta")
    resets = torch.zeros(5, 2, dtype=torch.bool, device="meta")
    y, state = core(torch.zeros(5, 2, 3, device="meta"), None, resets)
    y.sum().backward()
    assert y.shape == (5, 2, 4) and {leaf.shape for leaf in state.values()} == {(2, 2, 4)}
    with torch.no_grad():
        assert core(torch.zeros(2, 3, device="meta"), state, resets[0])[0].shape == (2, 4)
