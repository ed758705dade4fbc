"""Chooses the implementation of a recurrence from device, dtype and shape.

Each implementation is a module with functions `lstm` and `gru` of the signature in `reference.py`. A caller can name
one: `hf.LSTM(..., kernel="reference")`. On CPUs `HOLDFAST_CPU_KERNEL=portable|native` names one for all.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.kernels import portable, reference
from holdfast.kernels.cpu import recurrence as native

if TYPE_CHECKING:
    from holdfast.cores.gated import GatedCore

KERNELS: dict[str, ModuleType] = {"reference": reference, "portable": portable, "native": native}


def choose(recurrence: str, core: GatedCore, x: Tensor) -> ModuleType:
    """The module whose `lstm` or `gru` runs this sequence."""
    if core.kernel != "auto":
        if core.kernel not in KERNELS:
            raise ValueError(f"unknown kernel {core.kernel!r}; one of 'auto', {', '.join(map(repr, KERNELS))}")
        return KERNELS[core.kernel]
    if x.is_cuda:
        gpu = _gpu(core)
        if gpu is None or core.precision != "fast":
            return portable
        return gpu if gpu.supports(recurrence, x, core.hidden_size, core.state_dtype()) else portable
    return native if _native(core, x) else portable


def fused_step(core: GatedCore, x: Tensor) -> ModuleType | None:
    """The module whose `lstm_step` or `gru_step` runs this step without gradients, or None.

    None on a GPU: there a step is a sequence of length 1, bit for bit what training computes. The fused step of
    `gpu.py` takes half the time alone, but adds in another order; half-precision roundings then fall differently here
    and there, and over a rollout log-probabilities drift by some 1e-3.
    """
    if torch.is_grad_enabled() or core.kernel == "reference":
        return None
    if core.kernel != "portable" and _native(core, x):
        return native
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    return portable if x.dtype in (torch.float32, torch.float64) else None


def _gpu(core: GatedCore) -> ModuleType | None:
    """The GPU kernels, imported only where there is a GPU to run them."""
    if core.kernel != "auto":
        return None
    from holdfast.kernels import gpu

    return gpu


def _native(core: GatedCore, x: Tensor) -> bool:
    """Whether the C kernel runs this: CPU, everything in float32, and a library to run it."""
    single = core.state_dtype() == core._compute_dtype(x) == x.dtype == torch.float32
    return single and x.device.type == "cpu" and native.in_use()
