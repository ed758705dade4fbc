"""The C kernel against the float64 reference, for every instruction set this CPU has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import holdfast as hf
from holdfast.kernels import cpu, reference
from holdfast.kernels.cpu import library
from holdfast.kernels.operands import Resets, Weights

pytestmark = pytest.mark.skipif(library.load().handle is None, reason=f"no native kernel: {library.load().reason}")

RESET_MODES = ("none", "random", "all", "learned", "detach")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Call:
    """The arguments of a kernel by name, in float32, and gradients for its outputs."""

    cell: str
    inputs: dict[str, Tensor | None]
    detach: bool
    out_grads: list[Tensor]

    @classmethod
    def random(
        cls, cell: str, T: int, B: int, inputs: int, H: int, mode: str, seed: int = 0, bias: bool = True
    ) -> Call:
        random = torch.Generator().manual_seed(seed)
        gates, leaves = (4, "hc") if cell == "lstm" else (3, "h")

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        def weight(*shape: int) -> Tensor:
            return (torch.rand(*shape, generator=random) * 2 - 1) / H**0.5

        resets = None
        if mode != "none":
            resets = torch.rand(T, B, generator=random) < (1.0 if mode == "all" else 0.3)
        tensors: dict[str, Tensor | None] = {"x": normal(T, B, inputs)}
        tensors |= {f"{leaf}0": normal(B, H) for leaf in leaves}
        tensors |= {"resets": resets}
        tensors |= {f"reset_{leaf}": normal(H) if mode == "learned" else None for leaf in leaves}
        tensors |= {"w_ih": weight(gates * H, inputs), "w_hh": weight(gates * H, H)}
        tensors |= {name: weight(gates * H) if bias else None for name in ("b_ih", "b_hh")}
        out_grads = [torch.rand(T, B, H, generator=random), *(torch.rand(B, H, generator=random) for _ in leaves)]
        return cls(cell, tensors, mode == "detach", out_grads)

    def call(self, module: object, given: dict[str, Tensor | None] | None = None, function: str = "sequence") -> Any:
        """A function of the cell in a folder of `holdfast.kernels`, on `given` or the call's own inputs."""
        t = given or self.inputs
        resets = Resets(t["resets"], t["reset_h"], t.get("reset_c"), self.detach)
        weights = Weights(*[t[name] for name in Weights._fields])  # type: ignore[arg-type]
        state = [t[name] for name in ("h0", "c0") if name in t]
        return getattr(getattr(module, self.cell), function)(t["x"], *state, resets, weights)

    def run(self, module: object, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Outputs and the gradient of every float input."""
        given = {
            name: t if t is None or name == "resets" else t.detach().to(dtype).requires_grad_()
            for name, t in self.inputs.items()
        }
        outputs = self.call(module, given)
        leaves = {name: t for name, t in given.items() if t is not None and name != "resets"}
        grads = torch.autograd.grad(
            outputs, list(leaves.values()), [g.to(dtype) for g in self.out_grads], allow_unused=True
        )
        zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves.values())]
        return [o.detach() for o in outputs], dict(zip(leaves, zeros))


def largest(tensors: list[Tensor]) -> float:
    return max([float(t.abs().max()) for t in tensors if t.numel()], default=0.0)


def assert_agrees(call: Call, scale_by_kind: bool = False) -> None:
    """Outputs within 1e-6; each gradient within 2e-6 of its tensor's largest element.

    `scale_by_kind`: within 2e-6 of the largest gradient of its kind, inputs or weights. For random sizes: the only bias of
    a cell with one unit is a sum that may cancel almost completely, in any float32 arithmetic.
    """
    outputs, grads = call.run(cpu, torch.float32)
    expected_outputs, expected = call.run(reference, torch.float64)
    for got, want in zip(outputs, expected_outputs):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    for name, grad in grads.items():
        kind = [other for other in grads if (other[:2] in ("w_", "b_")) == (name[:2] in ("w_", "b_"))]
        scale = largest([expected[other] for other in (kind if scale_by_kind else [name])])
        error = largest([grad.double() - expected[name]])
        assert error <= 2e-6 * scale, f"{name}: {error / scale:.1e} relative"


@pytest.mark.parametrize("mode", RESET_MODES)
@pytest.mark.parametrize("batch", [1, 3, 65])
@pytest.mark.parametrize("hidden", [1, 7, 100, 333])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_outputs_and_gradients_match_the_reference(cell: str, hidden: int, batch: int, mode: str) -> None:
    assert_agrees(Call.random(cell, 7, batch, 5, hidden, mode))


@pytest.mark.parametrize("mode", ["random", "learned", "detach"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_every_instruction_set_matches_the_reference(cell: str, mode: str, isa: str) -> None:
    for T, batch, inputs, hidden in ((5, 1, 3, 20), (3, 9, 17, 33), (4, 70, 8, 16)):
        assert_agrees(Call.random(cell, T, batch, inputs, hidden, mode))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_sequences_longer_than_a_chunk_match_the_reference(cell: str) -> None:
    assert_agrees(Call.random(cell, 230, 1, 6, 24, "random"))
    assert_agrees(Call.random(cell, 50, 5, 6, 24, "learned"))


@settings(max_examples=100)
@given(
    cell=st.sampled_from(["lstm", "gru"]),
    mode=st.sampled_from(RESET_MODES),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(1, 40), st.integers(1, 70)),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_matches_the_reference(
    cell: str, mode: str, sizes: tuple[int, int, int, int], bias: bool, seed: int
) -> None:
    assert_agrees(Call.random(cell, *sizes, mode, seed, bias), scale_by_kind=True)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("T, batch", [(0, 3), (4, 0)])
def test_empty_sequences_and_batches_pass_the_state_through(cell: str, T: int, batch: int) -> None:
    call = Call.random(cell, T, batch, 5, 9, "random")
    outputs, grads = call.run(cpu, torch.float32)
    assert outputs[0].shape == (T, batch, 9)
    for leaf, final in zip(("h0", "c0"), outputs[1:]):
        torch.testing.assert_close(final, call.inputs[leaf])
        torch.testing.assert_close(grads[leaf], call.out_grads[1 if leaf == "h0" else 2])
    assert not grads["w_hh"].any() and not grads["b_ih"].any()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_nan_in_a_reset_row_does_not_spread(cell: str) -> None:
    clean = Call.random(cell, 6, 4, 5, 21, "random")
    clean.inputs["resets"] = torch.zeros(6, 4, dtype=torch.bool)
    clean.inputs["resets"][0, 1] = clean.inputs["resets"][3, 2] = True
    clean_outputs, _ = clean.run(cpu, torch.float32)
    for leaf in ("h0", "c0")[: len(clean_outputs) - 1]:
        clean.inputs[leaf][1] = torch.nan  # replaced before the first step
    outputs, grads = clean.run(cpu, torch.float32)
    for got, want in zip(outputs, clean_outputs):
        assert torch.equal(got, want)
    assert all(g.isfinite().all() for g in grads.values())
    assert not grads["h0"][1].any()

    clean.inputs["x"][1, 2] = torch.nan  # row 2 is lost from here to its reset at step 3
    outputs, _ = clean.run(cpu, torch.float32)
    assert outputs[0][1:3, 2].isnan().all()
    assert torch.equal(outputs[0][3:], clean_outputs[0][3:])
    assert torch.equal(outputs[0][:, [0, 1, 3]], clean_outputs[0][:, [0, 1, 3]])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_nan_gradients_do_not_cross_a_reset(cell: str) -> None:
    call = Call.random(cell, 6, 3, 5, 21, "none")
    call.inputs["resets"] = torch.zeros(6, 3, dtype=torch.bool)
    call.inputs["resets"][4, 1] = True
    call.out_grads[0][5, 1] = torch.nan
    _, grads = call.run(cpu, torch.float32)
    assert grads["x"][4:, 1].isnan().all()
    assert grads["x"][:4].isfinite().all() and grads["x"][:, [0, 2]].isfinite().all()
    assert grads["h0"].isfinite().all()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("mode", ["none", "random", "all", "learned"])
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 30])
def test_a_step_equals_a_sequence_of_one(cell: str, mode: str, batch: int, isa: str) -> None:
    call = Call.random(cell, 1, batch, 19, 37, mode)
    expected, _ = call.run(cpu, torch.float32)
    mask = call.inputs["resets"]
    got = call.call(cpu, {**call.inputs, "x": call.inputs["x"][0], "resets": None if mask is None else mask[0]}, "step")
    for mine, theirs in zip(got, expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_results_repeat_to_the_bit_for_a_given_number_of_threads(cell: str) -> None:
    call = Call.random(cell, 40, 32, 64, 64, "learned")
    assert 2 * library.MULTIPLICATIONS_PER_THREAD < 40 * 32 * 128 * 64 * 4  # enough work for two threads
    alone, alone_grads = call.run(cpu, torch.float32)
    torch.set_num_threads(2)
    first, second = call.run(cpu, torch.float32), call.run(cpu, torch.float32)
    for one, two in zip(first[0] + list(first[1].values()), second[0] + list(second[1].values())):
        assert torch.equal(one, two)
    for one, two in zip(first[0], alone):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    for one, two in zip(first[1].values(), alone_grads.values()):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-6 * largest([two]))


def test_calls_from_several_python_threads_at_once_do_not_mix() -> None:
    torch.set_num_threads(2)
    calls = [Call.random("lstm", 40, 32, 64, 64, "random", seed) for seed in range(4)]
    with torch.no_grad():
        expected = [call.call(cpu) for call in calls]
        with ThreadPoolExecutor(4) as threads:
            for _ in range(5):
                got = list(threads.map(lambda call: call.call(cpu), calls))
                for mine, theirs in zip(got, expected):
                    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_the_child_of_a_fork_can_call_after_its_parent_used_threads() -> None:
    torch.set_num_threads(2)
    call = Call.random("gru", 40, 32, 64, 64, "random")
    with torch.no_grad():
        expected = call.call(cpu)[0]
        child = os.fork()
        if child == 0:
            got = call.call(cpu)[0]
            os._exit(0 if got.numpy().tobytes() == expected.numpy().tobytes() else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_only_the_gradients_asked_for_are_computed(cell: str) -> None:
    call = Call.random(cell, 5, 3, 4, 9, "random")
    _, expected = call.run(cpu, torch.float32)
    for wanted in ("x", "h0", "w_hh", "b_hh"):
        given = {n: None if t is None else t.clone() for n, t in call.inputs.items()}
        given[wanted].requires_grad_()
        outputs = call.call(cpu, given)
        torch.autograd.backward(outputs, call.out_grads)
        torch.testing.assert_close(given[wanted].grad, expected[wanted], rtol=0, atol=0)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_strided_inputs_give_the_same_as_contiguous_ones(cell: str) -> None:
    call = Call.random(cell, 5, 3, 4, 9, "random")
    expected, expected_grads = call.run(cpu, torch.float32)
    for name in ("x", "h0", "resets", "w_hh"):
        call.inputs[name] = call.inputs[name].transpose(0, 1).contiguous().transpose(0, 1)
    outputs, grads = call.run(cpu, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected))
    assert all(torch.equal(grads[n], expected_grads[n]) for n in grads)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize("reset", ["zero", "learned", "detach"])
def test_compiled_whole_equals_eager_and_does_not_recompile_as_flags_change(cell: str, reset: str) -> None:
    torch._dynamo.reset()
    core = getattr(hf, cell)(4, 9, 2, reset=reset, kernel="native")
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 3, 4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for p in (0.0, 0.3, 1.0):
            resets = torch.rand(5, 3) < p
            gradients = []
            for run in (core, compiled):
                core.zero_grad()
                y, _ = run(x, None, resets)
                y.sum().backward()
                gradients.append([y, *[w.grad for w in core.parameters() if w.grad is not None]])
            for mine, theirs in zip(*gradients):
                torch.testing.assert_close(mine, theirs)


def test_a_second_derivative_is_refused() -> None:
    call = Call.random("lstm", 3, 2, 4, 5, "none")
    x = call.inputs["x"].requires_grad_()
    y, *_ = call.call(cpu)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_another_dtype_or_size_never_reaches_c() -> None:
    call = Call.random("lstm", 3, 2, 4, 5, "random")
    for name, wrong in (("w_hh", torch.randn(20, 5).double()), ("h0", torch.randn(3, 5)), ("resets", torch.ones(3, 2))):
        with pytest.raises(ValueError, match=f"{name} is"):
            call.call(cpu, {**call.inputs, name: wrong})
