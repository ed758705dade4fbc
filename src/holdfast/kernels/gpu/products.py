"""Linear layers whose products run in TF32 on a GPU, whatever torch's global setting: precision "fast" of linear cores.

TF32 reads float32 with 10 bits of mantissa and sums in float32. The global setting is switched around the calls and
restored. `linear` exists twice, as the recurrences do: as an operator for torch.compile, and as an autograd function.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from holdfast.kernels.operands import refuse_second_derivative


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


def _run_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with tf32():
        return F.linear(x, weight, bias)


def _run_backward(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    rows = dy.reshape(-1, dy.shape[-1]).contiguous()
    with tf32():
        dx = (rows @ weight).view(x.shape) if need_x else None
        return dx, rows.t() @ x.reshape(-1, x.shape[-1]), _sum_of_rows(rows)


def _sum_of_rows(rows: Tensor) -> Tensor:
    if not rows.is_cuda:
        return rows.sum(0)
    from holdfast.kernels.triton.sums import sum_rows  # imports Triton

    return sum_rows(rows)


@custom_op("holdfast::tf32_linear", mutates_args=())
def _operator(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    return _run_forward(x, weight, bias)


@_operator.register_fake
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@custom_op("holdfast::tf32_linear_backward", mutates_args=())
def _operator_backward(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _run_backward(dy, x, weight, need_x)
    return x.new_empty(0) if dx is None else dx, dw, db


@_operator_backward.register_fake
def _(dy, x, weight, need_x):
    return x.new_empty(x.shape if need_x else 0), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_bias = ctx.needs_input_grad
    dx, dw, db = _operator_backward(dy, *ctx.saved_tensors, need_x)
    return dx if need_x else None, dw if need_weight else None, db if need_bias else None


_operator.register_autograd(_gradients, setup_context=_save)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _run_forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        need_x, need_weight, need_bias = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        dx, dw, db = _run_backward(dy, x, weight, need_x)
        return dx, dw if need_weight else None, db if need_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I], weight [O, I], bias [O] -> [..., O], all float32; forward and backward in TF32."""
    if torch.compiler.is_compiling():
        return _operator(x, weight, bias)
    return _Eager.apply(x, weight, bias)  # type: ignore[no-untyped-call]
