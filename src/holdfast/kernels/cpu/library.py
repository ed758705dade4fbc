"""Finds, loads and calls the compiled C library through ctypes; independent of torch's ABI.

`HOLDFAST_CPU_ISA=avx512|avx2|plain` forces an instruction set, which the CPU must have.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.cpu import build

# What each function reads or writes without asking whether it is there.
_REQUIRED = {
    "forward": ("x", "h0", "c0", "w_ih", "w_hh", "y", "c_n"),
    "backward": ("x", "h0", "c0", "w_ih", "w_hh", "y", "gates", "cells"),
    "step": ("x", "h0", "c0", "w_ih", "w_hh", "y", "c_n"),
}
_OF_LSTM = {"c0", "c_n", "cells"}
_OUT_OF_MEMORY = 1  # statuses, see c/job.h
# A second thread pays off from about this many multiplications (some 0.2 ms of work).
MULTIPLICATIONS_PER_THREAD = 10_000_000


def struct(name: str) -> Any:
    """A struct of c/job.h as a class of ctypes, with the same fields in the same order."""
    header = re.sub(r"/\*.*?\*/", "", (build.SOURCES / "job.h").read_text(), flags=re.DOTALL)
    (body,) = re.findall(rf"typedef struct {{([^{{}}]*)}} {name};", header)
    fields = []
    for kind, declared in re.findall(r"(?:const )?(int64_t|double|float|uint8_t)\b([^;]*);", body):
        for stars, field, length in re.findall(r"([*\s]*(?:const)?[*\s]*)\b(\w+)(?:\[(.*?)\])?", declared):
            number: Any = (
                ctypes.c_void_p if "*" in stars else {"int64_t": ctypes.c_int64, "double": ctypes.c_double}[kind]
            )
            fields.append((field, number * _LENGTHS[length] if length else number))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


MAX_LAYERS = 8  # of c/job.h
_LENGTHS = {"MAX_LAYERS": MAX_LAYERS, "MAX_LAYERS + 1": MAX_LAYERS + 1}
_RecurrenceJob = struct("Job")


@dataclass(frozen=True)
class Library:
    """The loaded library, or the reason why there is none."""

    handle: ctypes.CDLL | None
    path: Path | None = None
    isa: str | None = None
    lanes: int = 1
    reason: str | None = None


@functools.cache
def load() -> Library:
    """Loads the library, building it first if needed. Never raises: without a handle, `reason` says why."""
    try:
        path, handle = _find()
        return Library(handle, path, *_choose_isa(handle))
    except (build.BuildError, OSError, AttributeError) as error:
        return Library(None, reason=str(error))


def _find() -> tuple[Path, ctypes.CDLL]:
    """The wheel's library if it was built from these sources, otherwise the one in the cache."""
    if build.PREBUILT.exists():
        handle = _open(build.PREBUILT)
        if handle.holdfast_key().decode() == build.key():
            return build.PREBUILT, handle
    path = build.library_path()
    return path, _open(path)


def _open(path: Path) -> ctypes.CDLL:
    handle = ctypes.CDLL(str(path))
    handle.holdfast_key.restype = ctypes.c_char_p
    handle.holdfast_choose.restype = ctypes.c_char_p
    handle.holdfast_lanes.restype = ctypes.c_int64
    return handle


def _choose_isa(handle: ctypes.CDLL) -> tuple[str, int]:
    wanted = os.environ.get("HOLDFAST_CPU_ISA", "")
    chosen = handle.holdfast_choose(wanted.encode())
    if chosen is None:
        raise build.BuildError(
            f"HOLDFAST_CPU_ISA={wanted!r} is not an instruction set of this CPU and build; one of "
            f"{', '.join(map(repr, build.isas()))}"
        )
    return chosen.decode(), handle.holdfast_lanes()


def padded(hidden: int) -> int:
    """`hidden` rounded up to whole vectors: the width of a gate in the tensors kept for the backward."""
    lanes = load().lanes
    return -(-hidden // lanes) * lanes


class PreparedCall:
    """A call of "forward", "backward" or "step" on contiguous tensors, by their names in c/job.h.

    It can be repeated as long as the tensors stay where they are; checks and addresses are those of its making.
    """

    def __init__(self, call: str, detach_at_reset: bool, tensors: dict[str, Tensor]) -> None:
        library = load()
        if library.handle is None:
            raise RuntimeError(f"the native kernel is not available: {library.reason}")
        is_lstm = "c0" in tensors
        missing = [name for name in _REQUIRED[call] if name not in tensors and (is_lstm or name not in _OF_LSTM)]
        if missing:
            raise ValueError(f"the native kernel's {call} needs {', '.join(missing)}")
        *time, B, inputs = tensors["x"].shape
        T = time[0] if time else 1
        H = tensors["w_hh"].shape[1]
        job = _RecurrenceJob(T, B, inputs, H, is_lstm, detach_at_reset, threads_for(B, T * B * (inputs + H) * H * 4))
        sizes = _sizes(T, B, inputs, H, 4 if is_lstm else 3, library.lanes)
        for name, tensor in tensors.items():
            dtype = torch.bool if name == "resets" else torch.float32
            setattr(job, name, address(tensor, sizes[name], dtype, name))
        self._tensors = tensors  # C knows only their addresses
        self._job, self._function = job, getattr(library.handle, f"holdfast_{call}")

    def __call__(self) -> None:
        job = self._job
        if status := self._function(ctypes.byref(job)):
            raise failure(status, f"T={job.steps}, B={job.batch}, I={job.inputs}, H={job.hidden}")


def address(tensor: Tensor, elements: int, dtype: torch.dtype, name: str) -> int:
    """The address of a tensor's numbers. C trusts its pointers, so everything about them is checked here."""
    if tensor.numel() != elements or tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else ", not contiguous,"
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}{layout} on {tensor.device}; the native kernel takes "
            f"{elements} elements of {dtype}, contiguous, on the CPU"
        )
    return tensor.data_ptr()


def failure(status: int, sizes: str) -> Exception:
    """The error for a status that a function in C returned."""
    if status == _OUT_OF_MEMORY:
        return MemoryError(f"the native kernel ran out of memory for {sizes}")
    return ValueError(f"the native kernel was called without an array that it needs, for {sizes}")


def threads_for(rows: int, multiplications: int) -> int:
    """How many threads share the `rows` of a call with this many multiplications."""
    return max(1, min(torch.get_num_threads(), rows, multiplications // MULTIPLICATIONS_PER_THREAD))


@functools.lru_cache(256)
def _sizes(T: int, B: int, inputs: int, H: int, gates: int, lanes: int) -> dict[str, int]:
    """Elements of each tensor."""
    x, y, state, w_ih, w_hh, bias = T * B * inputs, T * B * H, B * H, gates * H * inputs, gates * H * H, gates * H
    width = -(-H // lanes) * lanes
    return {
        **{"x": x, "resets": T * B, "h0": state, "c0": state, "reset_h": H, "reset_c": H},
        **{"w_ih": w_ih, "w_hh": w_hh, "b_ih": bias, "b_hh": bias},
        **{"y": y, "h_n": state, "c_n": state, "gates": 4 * T * B * width, "cells": T * B * width},
        **{"dy": y, "dh_n": state, "dc_n": state},
        **{"dx": x, "dh0": state, "dc0": state, "d_reset_h": H, "d_reset_c": H},
        **{"dw_ih": w_ih, "dw_hh": w_hh, "db_ih": bias, "db_hh": bias},
    }
