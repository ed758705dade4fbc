"""Which implementation runs: by device, dtype and the core's options."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.kernels import cpu, dispatch, portable
from holdfast.kernels.cpu import library
from holdfast.kernels.cpu.recurrence import in_use

needs_native = pytest.mark.skipif(library.load().handle is None, reason=f"no native kernel: {library.load().reason}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_go_to_the_portable_kernel(dtype: torch.dtype) -> None:
    core, x = hf.LSTM(4, 5).to(dtype), torch.randn(3, 2, 4, dtype=dtype)
    assert dispatch.kernel_name(core, x) == "portable"
    y, _ = core(x, None, torch.rand(3, 2) < 0.5)
    assert y.dtype == dtype


@needs_native
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_float32_on_a_cpu_goes_to_c_unless_the_variable_or_the_core_names_another(
    cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_CPU_KERNEL", raising=False)
    core, x = (hf.LSTM if cell == "lstm" else hf.GRU)(4, 5), torch.randn(3, 2, 4)
    assert dispatch.choose(core, x) is getattr(cpu, cell)
    monkeypatch.setenv("HOLDFAST_CPU_KERNEL", "portable")
    assert dispatch.choose(core, x) is getattr(portable, cell)
    monkeypatch.delenv("HOLDFAST_CPU_KERNEL")
    for name, folder in dispatch.KERNELS.items():
        core.kernel = name
        assert dispatch.choose(core, x) is getattr(folder, cell)


@needs_native
def test_autocast_goes_to_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_CPU_KERNEL", raising=False)
    core, x = hf.GRU(4, 5), torch.randn(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.kernel_name(core, x) == "portable"


def test_a_step_has_a_kernel_of_its_own_only_without_gradients() -> None:
    core, x = hf.LSTM(4, 5), torch.randn(2, 4)
    assert dispatch.choose_step(core, x) is None
    with torch.no_grad():
        assert dispatch.choose_step(core, x) is (cpu.lstm if in_use() else None)
        for core.kernel in dispatch.PURE_TORCH:  # torch's cell is as fast
            assert dispatch.choose_step(core, x) is None


# --- torch.func, forward mode, second derivatives ----------------------------------------------------------------------


def twins(cell: str, kernel: str, dtype: torch.dtype) -> tuple[hf.Core, hf.Core]:
    """A core, and the reference with the same weights."""
    make = hf.LSTM if cell == "lstm" else hf.GRU
    core, reference = make(3, 4, kernel=kernel).to(dtype), make(3, 4, kernel="reference").to(dtype)
    reference.load_state_dict(core.state_dict())
    return core, reference


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
@pytest.mark.parametrize("leg", ["sequence", "step", "step without gradients"])
def test_transforms_of_torch_func_run_through_the_reference(cell, dtype, transform, leg):
    core, reference = twins(cell, "auto", dtype)
    x = torch.randn(5, 2, 3, dtype=dtype) if leg == "sequence" else torch.randn(2, 3, dtype=dtype)
    with torch.set_grad_enabled(leg != "step without gradients"):
        got = TRANSFORMS[transform](lambda x: core(x)[0], x)
        expected = TRANSFORMS[transform](lambda x: reference(x)[0], x)
    torch.testing.assert_close(got, expected)
    assert got.abs().sum() > 0


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("kernel", ["portable", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
def test_a_kernel_that_was_named_refuses_transforms_and_names_the_reference(cell, kernel, transform):
    core, _ = twins(cell, kernel, torch.float32)
    with pytest.raises(RuntimeError, match=r"cannot run under torch\.func.*kernel=\"reference\""):
        TRANSFORMS[transform](lambda x: core(x)[0], torch.randn(5, 2, 3))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("kernel", ["portable", pytest.param("native", marks=needs_native)])
def test_a_second_derivative_is_refused_and_never_left_out(cell, kernel):
    core, _ = twins(cell, kernel, torch.float32)
    x = torch.randn(5, 2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*kernel=\"reference\""):
        (slope,) = torch.autograd.grad(core(x)[0].sum(), x, create_graph=True)
        slope.square().sum().backward()


def test_a_core_on_the_meta_device_says_how_to_give_it_numbers() -> None:
    core = hf.LSTM(3, 4).to("meta")
    for x in (torch.zeros(2, 3), torch.zeros(5, 2, 3)):
        with pytest.raises(ValueError, match=r"LSTM is on the meta device.*to_empty\(device='cpu'\)"):
            core(x)
    core.to_empty(device="cpu").load_state_dict(hf.LSTM(3, 4).state_dict())
    assert core(torch.zeros(2, 3))[0].shape == (2, 4)
