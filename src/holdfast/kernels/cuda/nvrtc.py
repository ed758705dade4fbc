"""Compiles CUDA C++ at run time with the NVRTC library that comes with torch, and launches it. No compiler is needed.

Compiled code is cached (`code_cache.py`), named by a hash of source, options and compiler version, so that later processes
load it in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast.kernels import code_cache

Launch = Callable[..., None]  # stream, then the values of the kernel's one parameter, a struct
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Parameters = ctypes.c_char_p * 1

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC of the CUDA version torch was built with: already loaded, in a wheel next to torch, or in a toolkit."""
    if torch.version.cuda is None:
        raise OSError("torch was built without CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    folders = [Path(p) / "nvidia" for p in sys.path if p] + [Path(torch.__file__).parent.parent / "nvidia"]
    wheels = [str(p) for folder in folders if folder.is_dir() for p in sorted(folder.glob(f"*/lib/{name}"))]
    toolkits = [str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / name)]
    for candidate in [name, *wheels, *toolkits]:
        try:
            for builtins in Path(candidate).parent.glob(f"libnvrtc-builtins.so.{torch.version.cuda}*"):
                ctypes.CDLL(str(builtins))  # found by its loaded name when NVRTC asks for it
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name} was not found next to torch, on the library path or in CUDA_HOME")


@functools.cache
def is_available() -> bool:
    """Whether CUDA C++ can be compiled and launched in this process."""
    try:
        _driver(), _nvrtc()
    except OSError:
        return False
    return torch.cuda.is_available()


def constant_when_compiled(function: _Function) -> _Function:
    """`torch.compiler.assume_constant_result` without importing the whole compiler, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _check(code: int, what: str) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: CUDA error {code} ({(text.value or b'unknown').decode()})")


def compile_to_cubin(source: str, options: Sequence[str]) -> bytes:
    """Machine code of `source`, from the cache if possible."""
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = "\0".join([source, *options, f"{major.value}.{minor.value}"])
    name = f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    cached = _cached(name)
    if cached is not None:
        return cached
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"recurrence.cu", 0, None, None)
    if code != 0:
        raise RuntimeError(f"nvrtcCreateProgram failed with code {code}")
    arguments = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    code = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    if code != 0:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC could not compile a kernel:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    _keep(name, cubin.raw)
    return cubin.raw


def _cached(name: str) -> bytes | None:
    try:
        path = code_cache.find(name)
        return None if path is None else path.read_bytes()
    except code_cache.UntrustedCacheError as error:
        _warn_once(str(error))
    except OSError:
        pass
    return None


def _keep(name: str, data: bytes) -> None:
    with contextlib.suppress(OSError):  # with a read-only home there is no cache; everything else works
        code_cache.store(name, data)


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"CUDA kernels are compiled in every process: {reason}", RuntimeWarning, stacklevel=2)


def _make_context_current(device: int) -> None:
    """Threads that torch starts (autograd's) have no current context before their first runtime call."""
    torch.cuda.init()
    context = ctypes.c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "retaining the CUDA context")
    _check(_driver().cuCtxSetCurrent(context), "making the CUDA context current")


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, with a value of three integers."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class Kernel:
    """One compiled `__global__` function on one device."""

    def __init__(self, source: str, name: str, options: Sequence[str], shared_bytes: int, device: int) -> None:
        self.shared_bytes = shared_bytes
        self._device = device
        with torch.cuda.device(device):
            _make_context_current(device)
            cubin = compile_to_cubin(source, options)
            module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
            _check(
                _driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()),
                f"finding {name}",
            )
            _check(
                _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes),
                f"reserving {shared_bytes} bytes of shared memory for {name}",
            )

    def most_clusters(self, size: int, threads: int) -> int:
        """How many clusters of `size` blocks, 8 at most, run at the same time."""
        driver, count = _driver(), ctypes.c_int()
        _make_context_current(self._device)
        attribute = _LaunchAttribute(_CLUSTER_DIMENSION, 0, (size, 1, 1))
        sizes = (size, 1, 1), (threads, 1, 1), self.shared_bytes
        config = _LaunchConfig(*sizes, None, ctypes.pointer(attribute), 1)
        asked = driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config))
        _check(asked, f"counting clusters of {size} blocks")
        return count.value

    def launcher(self, blocks: int, threads: int, layout: str, together: bool = False) -> Launch:
        """A function that launches this grid: `launch(stream, *values)`, values by `layout` as in `struct`.

        `together`: all blocks must run at once, because they wait for each other; otherwise it is an error.
        """
        driver, pack, stream_type = _driver(), struct.Struct(layout).pack, ctypes.c_void_p
        function = driver.cuLaunchCooperativeKernel if together else driver.cuLaunchKernel
        grid = functools.partial(function, self._function, blocks, 1, 1, threads, 1, 1, self.shared_bytes)
        rest = () if together else (None,)

        def launch(stream: int, *values: int) -> None:
            parameters = _Parameters(pack(*values))
            code = grid(stream_type(stream), parameters, *rest)
            if code == _NO_CONTEXT:
                _make_context_current(self._device)
                code = grid(stream_type(stream), parameters, *rest)
            if code:
                _check(code, "launching a recurrence kernel")

        return launch
