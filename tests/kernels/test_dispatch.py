"""Which implementation runs: by device, dtype and the core's options."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.kernels import cpu, dispatch, portable
from holdfast.kernels.cpu import library

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
        assert dispatch.choose_step(core, x) in (cpu.lstm, portable.lstm)
        core.kernel = "reference"
        assert dispatch.choose_step(core, x) is None
