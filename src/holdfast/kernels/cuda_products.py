"""Products of fp16 matrices by cuBLAS, called on addresses: no tensors, views or operator dispatch in between.

The library and its handle (stream, workspace) are torch's own, so streams and CUDA graphs work as with `torch.mm`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

Product = Callable[[int, int, int], None]  # addresses of a, b and of the result

_SINGLE, _HALF = 0, 2  # CUDA_R_32F, CUDA_R_16F
_SUMS_IN_SINGLE, _ANY_ALGORITHM = 68, 99  # CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT_TENSOR_OP
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@functools.cache
def _cublas() -> ctypes.CDLL:
    """The cuBLAS that torch has loaded."""
    if torch.version.cuda is None:
        raise OSError("torch was built without CUDA")
    return ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")


def is_available() -> bool:
    try:
        return bool(_cublas().cublasGemmEx)
    except (OSError, AttributeError):
        return False


def product(
    rows: int, columns: int, depth: int, strides: tuple[int, int, int], transposed: str = "", single: bool = False
) -> Product:
    """a [rows, depth] @ b [depth, columns], all row-major with elements from row to row as in `strides` (a, b, result).

    transposed: "a" or "b" where that one lies in memory the other way round. The result is fp16, or fp32 with `single`.
    """
    # cuBLAS thinks in columns: it computes the transposed result from b and a, in that order.
    gemm, pointer, handle = _cublas().cublasGemmEx, ctypes.c_void_p, torch._C._cuda_getCurrentBlasHandle
    flip_b, flip_a = int(transposed == "b"), int(transposed == "a")
    one, zero = ctypes.byref(_ONE), ctypes.byref(_ZERO)
    stride_a, stride_b, stride_result = strides
    kind = _SINGLE if single else _HALF

    def run(a: int, b: int, result: int) -> None:
        code = gemm(
            pointer(handle()), flip_b, flip_a, columns, rows, depth, one, pointer(b), _HALF, stride_b, pointer(a), _HALF,
            stride_a, zero, pointer(result), kind, stride_result, _SUMS_IN_SINGLE, _ANY_ALGORITHM,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"cuBLAS could not multiply [{rows}, {depth}] by [{depth}, {columns}]: status {code}")

    return run
