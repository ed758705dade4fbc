"""One LSTM layer on a GPU, behind the signature of `reference.lstm`.

Two ways in, one implementation: operators that torch.compile sees as single nodes, and, in eager mode, an autograd
function, because calling an operator written in Python costs more than the kernels take at small sizes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.fp16_layout import kept_layout
from holdfast.kernels.gpu_backend import backend


def _forward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save):
    run = backend(4, w_hh.shape[1], x.device).forward
    return run(x, h0, c0, None if cut else resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, save)


@torch.library.custom_op("holdfast::gpu_lstm", mutates_args=())
def gpu_lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, h_n, c_n, and what the backward needs (`half_products.kept_layout`), empty without `save`."""
    y, h_n, c_n, kept = _forward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save)
    return y, h_n, c_n, x.new_empty(0, dtype=torch.float16) if kept is None else kept


@gpu_lstm.register_fake
def _(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save):
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    kept = x.new_empty(kept_layout(steps * batch, inputs, hidden, 4)[2] if save else 0, dtype=torch.float16)
    return x.new_empty(steps, batch, hidden), h0.new_empty(batch, hidden), c0.new_empty(batch, hidden), kept


@torch.library.custom_op("holdfast::gpu_lstm_backward", mutates_args=())
def gpu_lstm_backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    kept: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    x_dtype: torch.dtype,
    need_dx: bool,
    fill: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `half_products.Gradients`; dx and the fills' are empty when not needed."""
    run = backend(4, h0.shape[1], h0.device).backward
    gradients = run(dy, dh_n, dc_n, kept, resets, w_ih, w_hh, h0.shape[0], h0.dtype, x_dtype, need_dx, True, fill)
    return tuple(h0.new_empty(0, dtype=torch.float32) if g is None else g for g in gradients)  # type: ignore[return-value]


@gpu_lstm_backward.register_fake
def _(dy, dh_n, dc_n, kept, h0, resets, w_ih, w_hh, x_dtype, need_dx, fill):
    batch, hidden = h0.shape
    inputs = w_ih.shape[1]
    steps = kept.shape[0] // kept_layout(batch, inputs, hidden, 4)[2]
    return (
        h0.new_empty((steps, batch, inputs) if need_dx else (0,), dtype=x_dtype if need_dx else torch.float32),
        *(h0.new_empty(batch, hidden) for _ in range(2)),
        *(h0.new_empty(hidden if fill else 0, dtype=torch.float32) for _ in range(2)),
        *(w_ih.new_empty(4 * hidden, n) for n in (inputs, hidden)),
        *(w_ih.new_empty(4 * hidden) for _ in range(2)),
    )


def _setup_operator(ctx, inputs, output):
    x, h0, _, resets, _, _, w_ih, w_hh, *_ = inputs
    ctx.save_for_backward(output[3], h0, resets, w_ih, w_hh)
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype


def _of_inputs(need, gradients):
    """In the order of the inputs; autograd gives them their dtypes."""
    dx, dh0, dc0, d_fill_h, d_fill_c, dw_ih, dw_hh, db_ih, db_hh = gradients
    return (
        dx if need[0] else None,
        dh0,
        dc0,
        None,
        d_fill_h if need[4] else None,
        d_fill_c if need[5] else None,
        dw_ih,
        dw_hh,
        db_ih if need[8] else None,
        db_hh if need[9] else None,
        None,
        None,
    )


def _operator_backward(ctx, dy, dh_n, dc_n, *_buffers):
    if dy is None and dh_n is None and dc_n is None:
        return (None,) * 12
    need = ctx.needs_input_grad
    return _of_inputs(
        need, gpu_lstm_backward(dy, dh_n, dc_n, *ctx.saved_tensors, ctx.x_dtype, need[0], need[4] or need[5])
    )


gpu_lstm.register_autograd(_operator_backward, setup_context=_setup_operator)


class _EagerLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save):
        y, h_n, c_n, kept = _forward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save)
        ctx.save_for_backward(kept, resets, w_ih, w_hh)
        ctx.set_materialize_grads(False)
        ctx.sizes = h0.shape[0], h0.dtype, x.dtype
        return y, h_n, c_n

    @staticmethod
    def backward(ctx, dy, dh_n, dc_n):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the GPU kernels have no second derivative (backward was called with create_graph=True); "
                'use kernel="reference"'
            )
        if dy is None and dh_n is None and dc_n is None:
            return (None,) * 12
        kept, resets, w_ih, w_hh = ctx.saved_tensors
        need, run = ctx.needs_input_grad, backend(4, w_hh.shape[1], kept.device).backward
        return _of_inputs(
            need,
            run(dy, dh_n, dc_n, kept, resets, w_ih, w_hh, *ctx.sizes, need[0], need[1] or need[2], need[4] or need[5]),
        )


# What Function.apply comes down to when no functorch transform is active; its own checks cost as much as a launch.
_apply = super(torch.autograd.Function, _EagerLSTM).apply


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    for tensor in tensors:  # noqa: SIM110 a loop that stops at the first is cheaper than any() of a generator
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM layer over a sequence: y [T, B, H], h_n [B, H], c_n [B, H]. Products in fp16, state in fp32."""
    if resets is None or cut:
        fill_h = fill_c = None
    save = torch.is_grad_enabled() and _any_requires_grad(w_hh, w_ih, x, h0, c0, b_ih, b_hh, fill_h, fill_c)
    arguments = (x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save)
    if torch.compiler.is_compiling():
        return gpu_lstm(*arguments)[:3]
    if save:
        plain = not torch._C._are_functorch_transforms_active()
        return _apply(*arguments) if plain else _EagerLSTM.apply(*arguments)
    return _forward(*arguments)[:3]
