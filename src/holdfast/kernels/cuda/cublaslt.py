"""Products of fp16 matrices by the cuBLASLt that torch has loaded, called on addresses.

A product of given sizes is set up once. A call is then little more than a launch: no tensors or views, no operator
dispatch and no choice of algorithm, which together take longer than a small product.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any, NamedTuple

import torch

from holdfast.kernels.cuda.nvrtc import Launch

_SINGLE, _HALF = 0, 2  # CUDA_R_32F, CUDA_R_16F
_TYPES = {torch.float32: _SINGLE, torch.float16: _HALF}
_SUMS_IN_SINGLE = 68  # CUBLAS_COMPUTE_32F
_POINTER_MODE, _FLIP_A, _FLIP_B = 2, 3, 4  # CUBLASLT_MATMUL_DESC_POINTER_MODE, _TRANSA, _TRANSB
_ON_DEVICE = 1  # CUBLASLT_POINTER_MODE_DEVICE
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_...
_IN_ONE_SEQUENCE, _IN_PARTS_OF_SINGLE = 0, 2  # CUBLASLT_REDUCTION_SCHEME_NONE, _COMPUTE_TYPE
_LARGEST_WORKSPACE = 32 << 20
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class Product(NamedTuple):
    run: Launch  # stream, addresses of a, b, the result, the workspace and, if scaled, of the factor
    workspace: int  # bytes


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise OSError("torch was built without CUDA")
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


@functools.cache
def is_available() -> bool:
    try:
        return bool(_library().cublasLtMatmul)
    except (OSError, AttributeError):
        return False


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"cuBLASLt could not {what}: status {code}")


def _created(name: str, *arguments: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _check(getattr(_library(), f"cublasLt{name}Create")(ctypes.byref(made), *arguments), f"create a {name}")
    return made


def _set(name: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    setter, size = getattr(_library(), f"cublasLt{name}SetAttribute"), ctypes.c_size_t(ctypes.sizeof(value))
    _check(setter(target, attribute, ctypes.byref(value), size), f"set attribute {attribute} of a {name}")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    return _created("")


def _destroy(made: list[tuple[str, ctypes.c_void_p]]) -> None:
    for name, thing in made:
        getattr(_library(), f"cublasLt{name}Destroy")(thing)


def product(
    rows: int,
    columns: int,
    depth: int,
    strides: tuple[int, int, int],
    device: int,
    transposed: str = "",
    result: torch.dtype = torch.float16,
    scaled: bool = False,
    in_parts: bool = True,
) -> Product:
    """a [rows, depth] @ b [depth, columns], all row-major with elements from row to row as in `strides` (a, b, result).

    transposed: "a" or "b" if that operand is stored transposed.
    scaled: the result is multiplied by a factor, the first of two floats on the device of which the second is 0.
    in_parts: sums may be split over the depth; without it, a row's result does not depend on how many rows there are.
    """
    # cuBLAS is column-major: it computes the transposed result, from b and a in that order.
    operation = _created("MatmulDesc", _SUMS_IN_SINGLE, _SINGLE)
    _set("MatmulDesc", operation, _FLIP_A, ctypes.c_int(int(transposed == "b")))
    _set("MatmulDesc", operation, _FLIP_B, ctypes.c_int(int(transposed == "a")))
    if scaled:
        _set("MatmulDesc", operation, _POINTER_MODE, ctypes.c_int(_ON_DEVICE))

    def layout(kind: int, height: int, width: int, stride: int, flipped: bool = False) -> ctypes.c_void_p:
        height, width = (width, height) if flipped else (height, width)
        return _created("MatrixLayout", kind, ctypes.c_uint64(width), ctypes.c_uint64(height), ctypes.c_int64(stride))

    of_a = layout(_HALF, rows, depth, strides[0], transposed == "a")
    of_b = layout(_HALF, depth, columns, strides[1], transposed == "b")
    of_result = layout(_TYPES[result], rows, columns, strides[2])
    preference = _created("MatmulPreference")
    _set("MatmulPreference", preference, _WORKSPACE, ctypes.c_uint64(_LARGEST_WORKSPACE))
    reductions = _IN_PARTS_OF_SINGLE if in_parts else _IN_ONE_SEQUENCE
    _set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(reductions))
    for attribute in _ALIGNMENTS:
        _set("MatmulPreference", preference, attribute, ctypes.c_uint32(16))

    library, handle, choice, count = _library(), _handle(device), _Choice(), ctypes.c_int(0)
    code = library.cublasLtMatmulAlgoGetHeuristic(
        handle, operation, of_b, of_a, of_result, of_result, preference, 1, ctypes.byref(choice), ctypes.byref(count)
    )
    _destroy([("MatmulPreference", preference)])
    _check(code or int(count.value == 0), f"multiply [{rows}, {depth}] by [{depth}, {columns}]")
    matmul, pointer = library.cublasLtMatmul, ctypes.c_void_p
    one, zero, algorithm = ctypes.byref(_ONE), ctypes.byref(_ZERO), ctypes.byref(choice)
    workspace_size = ctypes.c_size_t(choice.workspace)

    def run(stream: int, a: int, b: int, result: int, workspace: int, factor: int = 0) -> None:
        target = pointer(result)
        alpha, beta = (pointer(factor), pointer(factor + 4)) if factor else (one, zero)
        code = matmul(
            handle, operation, alpha, pointer(b), of_b, pointer(a), of_a, beta, target, of_result, target, of_result,
            algorithm, pointer(workspace), workspace_size, pointer(stream),
        )  # fmt: skip
        if code:
            _check(code, f"multiply [{rows}, {depth}] by [{depth}, {columns}]")

    layouts = [("MatrixLayout", of) for of in (of_a, of_b, of_result)]
    weakref.finalize(run, _destroy, [("MatmulDesc", operation), *layouts]).atexit = False
    return Product(run, choice.workspace)
