"""Which GPU implementation runs a layer: CUDA C++ where it can, otherwise Triton."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from holdfast.kernels.cuda import recurrence as cuda_recurrence
from holdfast.kernels.triton.tiles import LARGEST_HIDDEN

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(gates: int, x: Tensor, hidden_size: int, state_dtype: torch.dtype) -> bool:
    """Whether a GPU implementation takes this layer: sizes, dtypes and device. gates: 4 for an LSTM, 3 for a GRU."""
    if x.dtype not in _DTYPES or state_dtype not in _DTYPES or x.numel() == 0 or not x.is_cuda:
        return False
    return hidden_size <= LARGEST_HIDDEN or cuda_recurrence.supports(gates, hidden_size, x.get_device())


@functools.cache
def backend(gates: int, hidden_size: int, device: torch.device) -> ModuleType:
    """The module whose `forward` and `backward` run this size."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if cuda_recurrence.supports(gates, hidden_size, index):
            return cuda_recurrence
    if hidden_size > LARGEST_HIDDEN:
        raise ValueError(
            f"no GPU kernel takes hidden size {hidden_size} on {device}: multiples of 8 up to 1024 on compute "
            f"capability 8.0 and above, or any size up to {LARGEST_HIDDEN}; use the portable kernel"
        )
    from holdfast.kernels.triton import layer as triton_layer  # Triton is imported only where it runs

    return triton_layer
