"""One LSTM layer on a GPU as two operators, forward and backward, behind the signature of `reference.lstm`."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.gpu_backend import backend, input_gradient, sequence_forward, weight_gradients
from holdfast.kernels.half_products import convert, gradient_amax, pack_width


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, h_n, c_n, and for the backward: packed [x | h], gates and c_in [T*B, ...] fp16."""
    return sequence_forward(x, h0, c0, None if cut else resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, save)


@gpu_lstm.register_fake
def _(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save):
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    rows = steps * batch if save else 0
    widths = (pack_width(inputs, hidden)[1], 4 * hidden, hidden)
    buffers = (x.new_empty((rows, n) if save else (0,), dtype=torch.float16) for n in widths)
    return x.new_empty(steps, batch, hidden), torch.empty_like(h0), torch.empty_like(c0), *buffers


@torch.library.custom_op("holdfast::gpu_lstm_backward", mutates_args=())
def gpu_lstm_backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    packed: Tensor,
    gates: Tensor,
    c_in: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    x_dtype: torch.dtype,
    need_dx: bool,
    fill: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dh0, dc0, d_fill_h, d_fill_c, dw_ih, dw_hh, db; those not needed are empty."""
    batch, hidden = h0.shape
    inputs = w_ih.shape[1]
    steps = packed.shape[0] // batch
    first = pack_width(inputs, hidden)[0]
    dy = None if dy is None else dy.contiguous()
    dh_n, dc_n = (None if g is None else g.float().contiguous() for g in (dh_n, dc_n))
    amax = gradient_amax(dy, dh_n, dc_n)
    run = backend(4, hidden, batch, h0.device)
    d_gates, dh0, dc0, db, d_fill_h, d_fill_c = run.backward(
        gates, c_in, packed[:, first:], w_hh, resets, dy, dh_n, dc_n, amax, steps, x_dtype, fill
    )
    dx = h0.new_empty(0, dtype=x_dtype)
    if need_dx:
        dx = input_gradient(d_gates, w_ih, amax, (steps, batch, inputs), x_dtype)
    dw = weight_gradients(d_gates, packed)
    dw_ih, dw_hh = torch.empty_like(w_ih), torch.empty_like(w_hh)
    convert(dw[:, :inputs], dw_ih, amax)
    convert(dw[:, first : first + hidden], dw_hh, amax)
    if d_fill_h is None or d_fill_c is None:
        d_fill_h, d_fill_c = db.new_empty(0), db.new_empty(0)
    return dx, dh0.to(h0.dtype), dc0.to(h0.dtype), d_fill_h, d_fill_c, dw_ih, dw_hh, db


@gpu_lstm_backward.register_fake
def _(dy, dh_n, dc_n, packed, gates, c_in, h0, resets, w_ih, w_hh, x_dtype, need_dx, fill):
    batch, hidden = h0.shape
    dx_shape = (packed.shape[0] // batch, batch, w_ih.shape[1]) if need_dx else (0,)
    return (
        h0.new_empty(dx_shape, dtype=x_dtype),
        torch.empty_like(h0),
        torch.empty_like(h0),
        *(h0.new_empty(hidden if fill else 0, dtype=torch.float32) for _ in range(2)),
        torch.empty_like(w_ih),
        torch.empty_like(w_hh),
        h0.new_empty(4 * hidden, dtype=torch.float32),
    )


def _setup_context(ctx, inputs, output):
    x, h0, _, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, _, _ = inputs
    ctx.save_for_backward(*output[3:], h0, resets, w_ih, w_hh)
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if p is None else p.dtype for p in (x, fill_h, fill_c, b_ih, b_hh)]


def _backward(ctx, dy, dh_n, dc_n, *_buffers):
    if dy is None and dh_n is None and dc_n is None:
        return (None,) * 12
    need = ctx.needs_input_grad
    x, fill_h, fill_c, b_ih, b_hh = ctx.dtypes
    dx, dh0, dc0, d_fill_h, d_fill_c, dw_ih, dw_hh, db = gpu_lstm_backward(
        dy, dh_n, dc_n, *ctx.saved_tensors, x, need[0], need[4] or need[5]
    )
    return (
        dx if need[0] else None,
        dh0,
        dc0,
        None,
        d_fill_h.to(fill_h) if need[4] else None,
        d_fill_c.to(fill_c) if need[5] else None,
        dw_ih,
        dw_hh,
        None if b_ih is None else db.to(b_ih),
        None if b_hh is None else db.to(b_hh),
        None,
        None,
    )


gpu_lstm.register_autograd(_backward, setup_context=_setup_context)


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
    tensors = (x, h0, c0, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if resets is None or cut:
        fill_h = fill_c = None
    y, h_n, c_n, *_ = gpu_lstm(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save)
    return y, h_n, c_n
