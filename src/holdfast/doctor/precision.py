"""Full float32 for an examination, whatever the user set: in TF32 or bfloat16 the same product differs from leg to leg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn


@contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 numbers are computed in float32 inside; the settings are restored.

    A GPU rounds factors to TF32 (1e-3 of their size) only in some of its algorithms, and one step is computed by another
    algorithm than a segment.
    """
    parts: list[Any] = [cuda.matmul, *_parts(cudnn, "conv", "rnn"), *_parts(mkldnn, "matmul", "conv", "rnn")]
    before = [part.fp32_precision for part in parts]
    # torch has older names for the same settings and refuses to read them if they disagree: those are then left alone.
    matmul = in_cudnn = None
    with suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    with suppress(RuntimeError):
        in_cudnn, cudnn.allow_tf32 = cudnn.allow_tf32, False
    for part in parts:
        part.fp32_precision = "ieee"
    try:
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if in_cudnn is not None:
            cudnn.allow_tf32 = in_cudnn
        for part, precision in zip(parts, before):
            part.fp32_precision = precision


def _parts(backend: Any, *names: str) -> list[Any]:
    return [getattr(backend, name) for name in names]
