"""What torch does with a core besides running it: torch.func, traces, fake tensors, the meta device, second derivatives, ONNX."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import holdfast as hf
from cores.all_cores import CELLS, core_of, leaf_dtypes
from holdfast.state import leaves

T, B, SIZE = 5, 2, 6


def sequence(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, B, SIZE, generator=generator), torch.rand(T, B, generator=generator) < 0.3


@pytest.fixture(params=CELLS)
def core(request: pytest.FixtureRequest) -> hf.Core:
    torch.manual_seed(0)
    return core_of(request.param)


class Outputs(nn.Module):
    """The outputs alone, from a fresh state."""

    def __init__(self, core: hf.Core) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)[0]


@pytest.mark.parametrize("grad", [True, False])
def test_vmap_is_a_loop(core: hf.Core, grad: bool):
    x, resets = sequence()
    batch = torch.stack([x, -2 * x, x.flip(0)])
    with torch.set_grad_enabled(grad):
        for leg in (slice(None), 0):  # a sequence, a step
            mapped = torch.func.vmap(lambda x: core(x, None, resets[leg])[0])(batch[:, leg])  # noqa: B023
            torch.testing.assert_close(mapped, torch.stack([core(x, None, resets[leg])[0] for x in batch[:, leg]]))


def test_torch_func_differentiates_weights_and_inputs(core: hf.Core):
    x, resets = sequence()
    weights = {name: p.detach() for name, p in core.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(core, weights, (x, None, resets))[0].square().sum()

    core(x, None, resets)[0].square().sum().backward()
    for name, gradient in torch.func.grad(loss)(weights, x).items():
        torch.testing.assert_close(gradient, core.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.stack([x, 2 * x]))
    for name, gradient in per_sample.items():
        torch.testing.assert_close(gradient[0], core.get_parameter(name).grad, rtol=1e-4, atol=1e-5)

    direction, inputs = torch.ones_like(x), x.clone().requires_grad_()
    _, slope = torch.func.jvp(lambda x: loss(weights, x), (x,), (direction,))
    (gradient,) = torch.autograd.grad(core(inputs, None, resets)[0].square().sum(), inputs)
    torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad", [True, False])
def test_a_trace_is_the_core(core: hf.Core, grad: bool):
    x, other = sequence()[0], sequence(2)[0]
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; a loop over time is traced at its length
        for leg in (slice(None), 0):
            traced = torch.jit.trace(Outputs(core), x[leg])
            torch.testing.assert_close(traced(other[leg]), core(other[leg])[0])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_shapes_and_dtypes_are_known_without_numbers(core: hf.Core, where: str, grad: bool):
    mode: AbstractContextManager[Any] = FakeTensorMode() if where == "fake" else nullcontext()
    x, resets = sequence()
    with torch.set_grad_enabled(grad), mode:
        if where == "meta":
            core, x, resets = core.to("meta"), x.to("meta"), resets.to("meta")
        else:
            core = type(core)(SIZE, 6) if not isinstance(core, hf.WindowAttention | hf.MLSTM) else type(core)(SIZE, 8)
            x, resets = torch.randn(T, B, SIZE), torch.zeros(T, B, dtype=torch.bool)
        y, state = core(x, None, resets)
        assert y.shape == (T, B, core.output_size)
        assert [leaf.dtype for leaf in leaves(state)] == leaf_dtypes(core, torch.float32)
        y_step, state = core(x[0], state, resets[0])
        assert y_step.shape == (B, core.output_size)
        if grad:
            y.sum().backward()
            assert all(p.grad is not None and p.grad.shape == p.shape for p in core.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_second_derivative_is_that_of_the_reference_or_an_error(core: hf.Core, dtype: torch.dtype):
    x, resets = sequence()
    found = []
    for kernel in ("auto", "reference"):
        core.kernel = kernel  # type: ignore[assignment]
        core.to(dtype)
        weights = list(core.parameters())
        try:
            # A sum: the gradient that comes in is a constant.
            slopes = torch.autograd.grad(core(x.to(dtype), None, resets)[0].sum(), weights, create_graph=True)
            size = torch.stack([slope.square().sum() for slope in slopes]).sum()
            found.append(torch.autograd.grad(size, weights, allow_unused=True, materialize_grads=True))
        except RuntimeError as error:
            assert kernel == "auto" and "no second derivative" in str(error) and 'kernel="reference"' in str(error)
            found.append(None)
    assert found[1] is not None
    if found[0] is not None:
        for mine, theirs in zip(*found):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", ["lstm", "mingru", "window"])
@pytest.mark.parametrize("dynamo", [True, False])
def test_torch_onnx_exports_a_core_as_plain_operations(kind: str, dynamo: bool, tmp_path: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    core, (x, _), (other, _) = core_of(kind), sequence(), sequence(2)
    file = str(tmp_path / "core.onnx")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(Outputs(core), (x,), file, dynamo=dynamo, input_names=["x"], verbose=False)
        expected = core(other)[0]
    (y,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x": other.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("core_class", [hf.GRU, hf.LRU])
def test_a_kernel_chosen_by_name_is_refused_under_a_trace(core_class: Any):
    core = core_class(SIZE, 4, kernel="native")
    with (
        pytest.raises(RuntimeError, match=r"kernel='native' cannot run under.*torch\.jit\.trace"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.jit.trace(Outputs(core), sequence()[0])
