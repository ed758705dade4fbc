"""Chooses the implementation of a recurrence from device, dtype and shape. Nothing else does.

Each implementation is a folder with one module per cell, whose `sequence` has the signature of `reference/`. A caller can
name one: `hf.LSTM(..., kernel="reference")`. `HOLDFAST_CPU_KERNEL=portable|native` names one for all cores on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from holdfast.checks import is_rewritten, is_without_numbers
from holdfast.kernels import cpu, portable, reference
from holdfast.kernels.cpu.recurrence import in_use

if TYPE_CHECKING:
    from holdfast.cores.gated import GatedCore

KERNELS: dict[str, ModuleType] = {"reference": reference, "portable": portable, "native": cpu}
PURE_TORCH = ("reference", "portable")  # all that some cells have


def known_kernel(name: str, names: Iterable[str] = KERNELS) -> str:
    """The name; ValueError if it is neither "auto" nor among `names`. Kernels for GPUs have none: "auto" chooses them."""
    if name != "auto" and name not in names:
        raise ValueError(f"unknown kernel {name!r}; one of 'auto', {', '.join(map(repr, names))}")
    return name


def kernel_name(core: GatedCore, x: Tensor) -> str:
    """The implementation that runs sequences like x [T, B, I]: a key of `KERNELS`, or "gpu"."""
    return _choose(core, x)[0]


def choose(core: GatedCore, x: Tensor) -> ModuleType:
    """The module whose `sequence` runs x [T, B, I]."""
    return getattr(_choose(core, x)[1], core.cell)


def _choose(core: GatedCore, x: Tensor) -> tuple[str, ModuleType]:
    if known_kernel(core.kernel) != "auto":
        return core.kernel, _named(core.kernel)
    if needs_reference():
        return "reference", reference
    if is_without_numbers(x):
        return "portable", portable
    if x.is_cuda:
        from holdfast.kernels import gpu  # imported only where there is a GPU

        if core.precision == "fast" and gpu.supports(core.gates, x, core.hidden_size, core.state_dtype()):
            return "gpu", gpu
    elif _runs_natively(core, x):
        return "native", cpu
    return "portable", portable


def by_name(cell: str, kernel: str) -> ModuleType:
    """The module of a cell that has a reference and a portable form alone; "auto" is the portable one."""
    return getattr(reference if known_kernel(kernel, PURE_TORCH) == "reference" else portable, cell)


def choose_linear(kernel: str, b: Tensor) -> ModuleType:
    """The module whose `sequence` runs a linear recurrence over b [T, B, W]. kernel: "auto" or a key of `KERNELS`."""
    if known_kernel(kernel) == "auto":
        if needs_reference():
            return reference.linear
        if is_without_numbers(b):
            return portable.linear
        if b.is_cuda and b.dtype == torch.float32:
            from holdfast.kernels import gpu  # imported only where there is a GPU

            return gpu.linear
        native = b.device.type == "cpu" and b.dtype == torch.float32 and in_use()
        return cpu.linear if native else portable.linear
    return _named(kernel).linear


def _named(kernel: str) -> ModuleType:
    if kernel != "reference" and needs_reference():
        raise RuntimeError(
            f"kernel={kernel!r} cannot run under torch.func (jvp, grad, vmap), forward-mode differentiation, torch.jit.trace or an "
            'export to ONNX; use kernel="reference", or "auto"'
        )
    return KERNELS[kernel]


def choose_step(core: GatedCore, x: Tensor) -> ModuleType | None:
    """The module whose `step` runs x [B, I] without gradients; None if torch's own cell, or a sequence of length 1, does.

    On a GPU a step is a sequence of length 1, so that it computes bit for bit what training computes.
    """
    if torch.is_grad_enabled() or core.kernel in PURE_TORCH or needs_reference():
        return None
    return getattr(cpu, core.cell) if _runs_natively(core, x) else None


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, which only the reference can run under."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def needs_reference() -> bool:
    """Whether only the plain operations of the reference are right: torch differentiates, maps or records them."""
    return is_transformed() or is_rewritten()


def _runs_natively(core: GatedCore, x: Tensor) -> bool:
    """Whether the C kernel runs this: on a CPU, everything in float32, and the library is available."""
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or is_without_numbers(x):
        return False
    return x.dtype == core.state_dtype() == torch.float32 and in_use()
