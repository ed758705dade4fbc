"""Chooses the implementation of a recurrence from device, dtype and shape.

Each implementation is a module with functions `lstm` and `gru` of the signature in `reference.py`. A fast one may
refuse (`supports` returns False) and then the next in line takes the call. A caller can name one:
`core.kernel = "reference"`.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from holdfast.kernels import portable, reference

KERNELS: dict[str, ModuleType] = {"reference": reference, "portable": portable}


def choose(recurrence: str, x: Tensor, hidden_size: int, kernel: str = "auto") -> ModuleType:
    """The module whose `lstm` or `gru` runs this call."""
    if kernel != "auto":
        if kernel not in KERNELS:
            raise ValueError(f"unknown kernel {kernel!r}; one of 'auto', {', '.join(map(repr, KERNELS))}")
        return KERNELS[kernel]
    return portable
