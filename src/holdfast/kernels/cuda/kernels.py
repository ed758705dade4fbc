"""Compiles the CUDA sources of this folder for given sizes and dtypes, and prepares tensors for them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.cuda import nvrtc

KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SOURCES = {
    "forward": ("recurrence_common.cuh", "elements.cuh", "recurrence_forward.cu"),
    "backward": ("recurrence_common.cuh", "gradient_scale.cuh", "recurrence_backward.cu"),
    "conversions": ("gradient_scale.cuh", "elements.cuh", "conversions.cu"),
}


@functools.cache
def limits(device: int) -> tuple[int, int, int]:
    """(multiprocessors, bytes of shared memory of one block, compute capability as 10 * major + minor)."""
    p: Any = torch.cuda.get_device_properties(device)  # its stub lacks an attribute
    return p.multi_processor_count, p.shared_memory_per_block_optin, 10 * p.major + p.minor


@functools.cache
def _source(name: str) -> str:
    return "".join((Path(__file__).parent / file).read_text() for file in _SOURCES[name])


def compiled(source: str, name: str, constants: dict[str, int], shared: int, device: int) -> nvrtc.Kernel:
    """The kernel `name` with these constants; loaded once for all batch sizes."""
    return load(source, name, tuple(constants.items()), shared, device)


@functools.cache
def load(source: str, name: str, constants: tuple[tuple[str, int], ...], shared: int, device: int) -> nvrtc.Kernel:
    architecture = f"--gpu-architecture=sm_{limits(device)[2]}"
    options = [architecture, "-std=c++17", *(f"-D{k}={int(v)}" for k, v in constants)]
    return nvrtc.Kernel(_source(source), name, options, shared, device)


def ready(tensor: Tensor) -> Tensor:
    """Contiguous and aligned for 16-byte accesses."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def bias_like(bias: Tensor | None, w_ih: Tensor) -> Tensor | None:
    """The bias in the dtype of the weights, as the kernels expect it."""
    if bias is None or bias.dtype == w_ih.dtype:
        return None if bias is None else bias.contiguous()
    return bias.to(w_ih.dtype).contiguous()
