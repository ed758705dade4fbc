"""Chooses the implementation of a recurrence from device, dtype and shape.

Each implementation is a module with functions `lstm` and `gru` of the signature in `reference.py`. A caller can name
one: `hf.LSTM(..., kernel="reference")`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from holdfast.kernels import portable, reference

if TYPE_CHECKING:
    from holdfast.cores.gated import GatedCore

KERNELS: dict[str, ModuleType] = {"reference": reference, "portable": portable}


def choose(recurrence: str, core: GatedCore, x: Tensor) -> ModuleType:
    """The module whose `lstm` or `gru` runs this sequence."""
    if core.kernel != "auto":
        if core.kernel not in KERNELS:
            raise ValueError(f"unknown kernel {core.kernel!r}; one of 'auto', {', '.join(map(repr, KERNELS))}")
        return KERNELS[core.kernel]
    return portable


def fused_step(core: GatedCore, x: Tensor) -> ModuleType | None:
    """The module whose `lstm_step` or `gru_step` runs this step without gradients, or None: torch's own cell."""
    return None
