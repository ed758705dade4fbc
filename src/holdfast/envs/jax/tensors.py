"""Arrays between JAX and torch, by DLPack: no copies, on a CPU or a GPU. Also how JAX is imported.

On a GPU both libraries work on streams of their own. DLPack orders them: what JAX computes from a torch tensor waits for torch's
work so far, and torch's later work waits for an array that JAX hands over. A step takes torch's actions and hands over all its
results, so neither library can reuse memory that the other still reads. Whatever else JAX computes between steps must take a
tensor too: otherwise it may write where torch still reads an array that was given back.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from holdfast.envs.jax.protocol import PREALLOCATE, keep_jax_from_preallocating

SIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}  # torch computes little with these unsigned integers


def import_jax(extra: str = "jax") -> Any:
    """JAX, or an error that names the extra to install."""
    keep_jax_from_preallocating()
    try:
        import jax
    except ImportError as missing:
        raise ModuleNotFoundError(
            f"environments written in JAX need it ({missing}): pip install 'holdfast[{extra}]', on a GPU also 'jax[cuda13]'"
        ) from missing
    return jax


def require_device(jax: Any, device: torch.device) -> None:
    """Raise ValueError if JAX cannot compute on this device of torch's; warn if it took the memory already."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"JAX environments run on cpu and cuda, not on {device.type}; pass --device cpu")
    try:
        devices = jax.devices(device.type)
    except RuntimeError as unknown:
        raise ValueError(
            f"the device is {device}, but JAX has no GPU here: pip install 'jax[cuda13]' (or cuda12), or pass --device cpu"
        ) from unknown
    if device.type == "cuda" and os.environ.get(PREALLOCATE) == "false":
        memory = devices[device.index or 0].memory_stats() or {}
        if memory.get("pool_bytes", 0) > memory.get("bytes_limit", 0) / 2 > 0:
            warnings.warn(
                f"JAX was in use before and keeps {memory['pool_bytes'] / 2**30:.0f} GiB of the GPU's memory for itself; "
                f"set {PREALLOCATE}=false before the first use of JAX",
                stacklevel=4,
            )


def to_jax(tensor: Tensor) -> Any:
    """The same memory as a JAX array, unless the tensor is not contiguous."""
    import jax

    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def to_torch(array: Any) -> Tensor:
    """The same memory as a tensor. Nobody may write to it: JAX takes its arrays to be constant."""
    return from_dlpack(array)


def saved_form(array: Any) -> Tensor:
    """An array of a state as a tensor: unsigned integers as signed ones with the same bits."""
    import jax

    kind = SIGNED.get(str(array.dtype))
    return to_torch(array if kind is None else jax.lax.bitcast_convert_type(array, kind))


def from_saved_form(tensor: Tensor, dtype: Any) -> Any:
    """The inverse of `saved_form`, in memory of JAX's own: a step takes over the arrays of its state."""
    import jax

    array = jax.numpy.array(to_jax(tensor), copy=True)
    return jax.lax.bitcast_convert_type(array, dtype) if str(dtype) in SIGNED else array
