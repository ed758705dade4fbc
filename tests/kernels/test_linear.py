"""The linear recurrence: the reference by hand, the fast forms against it in float64, and how it is called."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.episodes import quick
from holdfast.kernels import cpu, dispatch, portable, reference
from holdfast.kernels.cpu import recurrence as native
from holdfast.kernels.linear import linear_recurrence
from holdfast.kernels.operands import Resets
from kernels.linear_problems import FORMS, Problem

KERNELS = {"portable": portable, **({"native": cpu} if native.in_use() else {})}
SIZES = [(1, 1, 2), (7, 3, 6), (33, 5, 38), (3, 70, 64)]  # no multiples of a vector, and more rows than one group


def flags(*values):
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


def test_the_reference_by_hand():
    a, b, h0 = torch.tensor([0.5]), torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1), torch.tensor([[8.0]])
    h, last = reference.linear.sequence(a, b, h0, Resets(flags(False, True, False), torch.tensor([10.0])))
    assert h.flatten().tolist() == [5.0, 7.0, 7.5] and last.tolist() == [[7.5]]
    turn = torch.tensor([0.0, 1.0])  # i: h turns by a quarter in each step
    h, _ = reference.linear.sequence(turn, torch.zeros(3, 1, 2), torch.tensor([[1.0, 0.0]]), Resets(), "complex")
    assert h.squeeze(1).tolist() == [[0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]
    gates = torch.tensor([[0.0, 6.0]]).expand(2, 1, 2)  # half of the state is replaced by 6
    h, _ = reference.linear.sequence(None, gates, torch.tensor([[2.0]]), Resets(), "gated")
    assert h.flatten().tolist() == [4.0, 5.0]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("form", "per_channel"), FORMS)
@pytest.mark.parametrize("resets", [None, 0.2, 1.0])
@pytest.mark.parametrize("mode", ["zero", "learned", "detach"])
def test_outputs_and_gradients_agree_with_the_float64_reference(kernel, form, per_channel, resets, mode):
    for seed, size in enumerate(SIZES):
        problem = Problem(form, per_channel, size, resets, mode == "learned", mode == "detach", seed)
        error, name = problem.worst_error(KERNELS[kernel].linear.sequence, torch.float32)
        assert error < 1e-5, f"{name} at {size} is off by {error:.1e} of its maximum"
        if kernel == "portable":
            assert problem.worst_error(portable.linear.sequence, torch.float64)[0] < 1e-12


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_summed_over_many_rows_and_steps_stays_exact(kernel):
    problem = Problem("complex", True, (200, 300, 4), 0.02, learned=True)
    assert problem.worst_error(KERNELS[kernel].linear.sequence, torch.float32)[0] < 1e-5


@pytest.mark.parametrize("kernel", ["reference", *KERNELS])
@pytest.mark.parametrize(("form", "per_channel"), FORMS)
def test_a_reset_clears_nan_and_infinity_and_leaves_other_rows_alone(kernel, form, per_channel):
    problem = Problem(form, per_channel, (6, 3, 8), resets=None, learned=True)
    mask = torch.zeros(6, 3, dtype=torch.bool)
    mask[2, 1] = mask[4, 0] = True
    problem.mask = mask
    sequence = dispatch.KERNELS[kernel].linear.sequence
    clean = problem.answer(sequence, torch.float32)
    problem.tensors["h0"][1, 0], problem.tensors["h0"][0, 3] = float("nan"), float("inf")
    dirty = problem.answer(sequence, torch.float32)
    assert torch.equal(dirty["h"][2:, 1], clean["h"][2:, 1]) and torch.equal(dirty["h"][4:, 0], clean["h"][4:, 0])
    assert torch.equal(dirty["h"][:, 2], clean["h"][:, 2])
    assert torch.equal(dirty["d b"][2:, 1], clean["d b"][2:, 1]) and torch.equal(dirty["d b"][:, 2], clean["d b"][:, 2])
    assert torch.equal(dirty["d fill"], clean["d fill"])


@pytest.mark.parametrize("kernel", ["reference", *KERNELS])
@quick
@given(T=st.integers(1, 9), B=st.integers(1, 5), cut=st.integers(0, 9), seed=st.integers(0, 99))
def test_two_halves_of_a_sequence_give_the_bits_of_the_whole(kernel, T, B, cut, seed):
    for form, per_channel in FORMS:
        problem = Problem(form, per_channel, (T, B, 6), 0.3, learned=True, seed=seed)
        a, b, h0, fill = (
            problem.tensors[n].float() if n in problem.tensors else None for n in ("a", "b", "h0", "fill")
        )
        sequence = dispatch.KERNELS[kernel].linear.sequence
        whole, last = sequence(a, b, h0, Resets(problem.mask, fill), form)
        state, parts = h0, []
        for part in (slice(0, min(cut, T)), slice(min(cut, T), T)):
            if part.start == part.stop:
                continue
            mine = a if a is None or per_channel else a[part]
            h, state = sequence(mine, b[part], state, Resets(problem.mask[part], fill), form)
            parts.append(h)
        assert torch.equal(torch.cat(parts), whole) and torch.equal(state, last)


@pytest.mark.skipif(not native.in_use(), reason="no native kernel")
@pytest.mark.parametrize(("form", "per_channel"), FORMS)
def test_threads_give_what_one_thread_gives(form, per_channel):
    problem = Problem(form, per_channel, (400, 41, 16), 0.05, learned=True)
    before = torch.get_num_threads()
    one = problem.answer(cpu.linear.sequence, torch.float32)
    try:
        torch.set_num_threads(2)
        two = problem.answer(cpu.linear.sequence, torch.float32)
    finally:
        torch.set_num_threads(before)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_operator_is_one_node_of_a_compiled_graph_and_is_registered_as_torch_wants_it(kernel):
    problem = Problem("complex", True, (4, 3, 6), 0.4, learned=True)
    a, b, h0, fill = (problem.tensors[n].float().requires_grad_() for n in ("a", "b", "h0", "fill"))
    operator = getattr(torch.ops.holdfast, f"linear_{kernel}")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (b, a, h0, problem.mask, fill, False, "complex"), test_utils=checks)
    compiled = torch.compile(linear_recurrence, fullgraph=True, backend="aot_eager")
    results = [f(a, b, h0, problem.mask, fill, form="complex", kernel=kernel)[0] for f in (linear_recurrence, compiled)]
    gradients = [torch.autograd.grad(h.square().sum(), (a, b, h0, fill)) for h in results]
    assert torch.equal(*results) and all(torch.equal(x, y) for x, y in zip(*gradients))


def test_what_does_not_fit_is_refused_with_what_came_and_what_was_expected():
    a, b, h0 = torch.ones(4), torch.ones(3, 2, 4), torch.ones(2, 4)
    for arguments, options, words in (
        ((a, b[0], h0), {}, r"b has shape \(2, 4\), expected \[T, B, W\]"),
        ((a[:3], b, h0), {}, r"a has shape \(3,\), expected \(3, 2, 4\) or \(4,\)"),
        ((a, b, h0[:1]), {}, r"h0 has shape \(1, 4\), expected \(2, 4\)"),
        ((a.double(), b, h0), {}, r"a is torch.float64 on cpu, b torch.float32"),
        ((a, b, h0, None, a[:2]), {}, r"fill has shape \(2,\), expected \(4,\)"),
        ((a, b, h0), {"form": "gated"}, "unknown form 'gated'"),
        ((a[:3], b[..., :3], h0[:, :3]), {"form": "complex"}, "even number"),
        ((a, b, h0), {"kernel": "quick"}, "unknown kernel 'quick'"),
    ):
        with pytest.raises(ValueError, match=words):
            linear_recurrence(*arguments, **options)
    with pytest.raises(TypeError, match=r"resets has dtype torch\.float32"):
        linear_recurrence(a, b, h0, torch.zeros(3, 2))
