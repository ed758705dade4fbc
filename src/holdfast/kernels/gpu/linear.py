"""The linear recurrence on a GPU, with the signature of `reference.linear`: float32, any size. Triton is imported at use."""

from __future__ import annotations

from torch import Tensor

from holdfast.kernels.linear_operator import Gradients, Kept, Needed, make_operator
from holdfast.kernels.operands import Resets


def _forward(a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str) -> tuple[Tensor, Tensor]:
    from holdfast.kernels.triton import linear_kernels

    return linear_kernels.forward(a, b, h0, resets, form)


def _backward(dh: Tensor | None, dh_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    from holdfast.kernels.triton import linear_kernels

    return linear_kernels.backward(dh, dh_n, kept, needed)


sequence = make_operator("linear_gpu", _forward, _backward)
