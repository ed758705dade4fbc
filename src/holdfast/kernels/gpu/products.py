"""Linear layers whose products run in TF32 on a GPU, whatever torch's global setting: precision "fast" of linear cores.

TF32 reads float32 with 10 bits of mantissa and sums in float32. The global setting is switched around the calls and
restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.operators import make_operator


@contextmanager
def tf32() -> Iterator[None]:
    matmul, wanted = torch.backends.cuda.matmul, cast(Any, True)
    try:
        name, before = "allow_tf32", matmul.allow_tf32
    except RuntimeError:  # torch refuses to mix its two settings; somebody has used the newer one
        name, wanted, before = "fp32_precision", "tf32", matmul.fp32_precision
    if before == wanted:
        yield
        return
    setattr(matmul, name, wanted)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
    with tf32():
        return F.linear(x, weight, bias), None


def _backward(gradients: Any, inputs: Any, outputs: Any, options: Any, needed: Sequence[bool]) -> Sequence[Any]:
    (dy,), (x, weight, _) = gradients, inputs
    rows = dy.reshape(-1, dy.shape[-1]).contiguous()
    with tf32():
        dx = (rows @ weight).view(x.shape) if needed[0] else None
        return dx, rows.t() @ x.reshape(-1, x.shape[-1]), _sum_of_rows(rows)


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
    return x.new_empty(*x.shape[:-1], weight.shape[0]), None


def _sum_of_rows(rows: Tensor) -> Tensor:
    if not rows.is_cuda:
        return rows.sum(0)
    from holdfast.kernels.triton.sums import sum_rows  # imports Triton

    return sum_rows(rows)


_operator = make_operator(
    "tf32_linear", ("x", "weight", "bias?"), (), _forward, _backward, _empty, outputs=2, differentiable=1
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I], weight [O, I], bias [O] -> [..., O], all float32; forward and backward in TF32."""
    y: Tensor = _operator(x, weight, bias)[0]
    return y
