"""One GRU layer on a GPU, behind the signature of `reference.gru`.

Two ways in, one implementation: operators that torch.compile sees as single nodes, and, in eager mode, an autograd
function, because calling an operator written in Python costs more than the kernels take at small sizes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.fp16_layout import kept_layout
from holdfast.kernels.gpu_backend import backend


def _forward(x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut, save):
    run = backend(3, w_hh.shape[1], x.device).forward
    y, h_n, _, kept = run(x, h0, h0, None if cut else resets, fill_h, None, w_ih, w_hh, b_ih, b_hh, save)
    return y, h_n, kept


@torch.library.custom_op("holdfast::gpu_gru", mutates_args=())
def gpu_gru(
    x: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h_n, and what the backward needs (`half_products.kept_layout`), empty without `save`."""
    y, h_n, kept = _forward(x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut, save)
    return y, h_n, x.new_empty(0, dtype=torch.float16) if kept is None else kept


@gpu_gru.register_fake
def _(x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut, save):
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    kept = x.new_empty(kept_layout(steps * batch, inputs, hidden, 3)[2] if save else 0, dtype=torch.float16)
    return x.new_empty(steps, batch, hidden), h0.new_empty(batch, hidden), kept


@torch.library.custom_op("holdfast::gpu_gru_backward", mutates_args=())
def gpu_gru_backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    kept: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    x_dtype: torch.dtype,
    need_dx: bool,
    fill: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `half_products.Gradients` without those of c; dx and the fill's are empty when not needed."""
    run = backend(3, h0.shape[1], h0.device).backward
    dx, dh0, _, d_fill_h, _, *parameters = run(
        dy, dh_n, None, kept, resets, w_ih, w_hh, h0.shape[0], h0.dtype, x_dtype, need_dx, True, fill
    )
    gradients = dx, dh0, d_fill_h, *parameters
    return tuple(h0.new_empty(0, dtype=torch.float32) if g is None else g for g in gradients)  # type: ignore[return-value]


@gpu_gru_backward.register_fake
def _(dy, dh_n, kept, h0, resets, w_ih, w_hh, x_dtype, need_dx, fill):
    batch, hidden = h0.shape
    inputs = w_ih.shape[1]
    steps = kept.shape[0] // kept_layout(batch, inputs, hidden, 3)[2]
    return (
        h0.new_empty((steps, batch, inputs) if need_dx else (0,), dtype=x_dtype if need_dx else torch.float32),
        h0.new_empty(batch, hidden),
        h0.new_empty(hidden if fill else 0, dtype=torch.float32),
        *(w_ih.new_empty(3 * hidden, n) for n in (inputs, hidden)),
        *(w_ih.new_empty(3 * hidden) for _ in range(2)),
    )


def _setup_operator(ctx, inputs, output):
    x, h0, resets, _, w_ih, w_hh, *_ = inputs
    ctx.save_for_backward(output[2], h0, resets, w_ih, w_hh)
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype


def _of_inputs(need, dx, dh0, d_fill_h, dw_ih, dw_hh, db_ih, db_hh):
    """In the order of the inputs; autograd gives them their dtypes."""
    return (
        dx if need[0] else None,
        dh0,
        None,
        d_fill_h if need[3] else None,
        dw_ih,
        dw_hh,
        db_ih if need[6] else None,
        db_hh if need[7] else None,
        None,
        None,
    )


def _operator_backward(ctx, dy, dh_n, *_buffers):
    if dy is None and dh_n is None:
        return (None,) * 10
    need = ctx.needs_input_grad
    return _of_inputs(need, *gpu_gru_backward(dy, dh_n, *ctx.saved_tensors, ctx.x_dtype, need[0], need[3]))


gpu_gru.register_autograd(_operator_backward, setup_context=_setup_operator)


class _EagerGRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut, save):
        y, h_n, kept = _forward(x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut, save)
        ctx.save_for_backward(kept, resets, w_ih, w_hh)
        ctx.set_materialize_grads(False)
        ctx.sizes = h0.shape[0], h0.dtype, x.dtype
        return y, h_n

    @staticmethod
    def backward(ctx, dy, dh_n):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the GPU kernels have no second derivative (backward was called with create_graph=True); "
                'use kernel="reference"'
            )
        if dy is None and dh_n is None:
            return (None,) * 10
        kept, resets, w_ih, w_hh = ctx.saved_tensors
        need, run = ctx.needs_input_grad, backend(3, w_hh.shape[1], kept.device).backward
        dx, dh0, _, d_fill_h, _, *parameters = run(
            dy, dh_n, None, kept, resets, w_ih, w_hh, *ctx.sizes, need[0], need[1], need[3]
        )
        return _of_inputs(need, dx, dh0, d_fill_h, *parameters)


# What Function.apply comes down to when no functorch transform is active; its own checks cost as much as a launch.
_apply = super(torch.autograd.Function, _EagerGRU).apply


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    for tensor in tensors:  # noqa: SIM110 a loop that stops at the first is cheaper than any() of a generator
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def gru(
    x: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool = False,
) -> tuple[Tensor, Tensor]:
    """One GRU layer over a sequence: y [T, B, H], h_n [B, H]. Products in fp16, state in fp32."""
    if resets is None or cut:
        fill_h = None
    save = torch.is_grad_enabled() and _any_requires_grad(w_hh, w_ih, x, h0, b_ih, b_hh, fill_h)
    arguments = (x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut, save)
    if torch.compiler.is_compiling():
        return gpu_gru(*arguments)[:2]
    if save:
        plain = not torch._C._are_functorch_transforms_active()
        return _apply(*arguments) if plain else _EagerGRU.apply(*arguments)
    return _forward(*arguments)[:2]
