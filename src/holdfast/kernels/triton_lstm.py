"""One LSTM layer on a GPU as two operators, forward and backward, with the signature of `reference.lstm`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from holdfast.kernels.half_products import convert, gradient_amax, mm_fp32, pack_inputs, pack_width, project
from holdfast.kernels.triton_lstm_kernels import lstm_backward_kernel, lstm_forward_kernel
from holdfast.kernels.triton_tiles import recurrence_tile


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
    """y, h_n, c_n, and for the backward: packed [x | h] and gates [T*B, ...], c_in [T*B, H], all fp16."""
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    packed = pack_inputs(x.contiguous(), hidden if save else 0)
    gates = project(packed, w_ih)
    y = torch.empty(steps, batch, hidden, dtype=x.dtype, device=x.device)
    h_n, c_n = torch.empty_like(h0), torch.empty_like(c0)
    c_in = gates.new_empty((steps * batch, hidden) if save else (0,))
    padded, rows, warps = recurrence_tile(hidden, batch)
    first, width = pack_width(inputs, hidden)
    lstm_forward_kernel[(triton.cdiv(batch, rows),)](
        gates, w_hh, b_ih, b_hh, h0, c0, resets, fill_h, fill_c, y, h_n, c_n, packed[:, first:], c_in,
        steps, batch, width, H=hidden, HP=padded, ROWS=rows, SAVE=save, CUT=cut, num_warps=warps,
    )  # fmt: skip
    if not save:
        packed, gates = packed.new_empty(0), packed.new_empty(0)
    return y, h_n, c_n, packed, gates, c_in


@gpu_lstm.register_fake
def _(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save):  # type: ignore[no-untyped-def]
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    _, width = pack_width(inputs, hidden)
    y = x.new_empty(steps, batch, hidden)
    if save:
        shapes = [(steps * batch, width), (steps * batch, 4 * hidden), (steps * batch, hidden)]
    else:
        shapes = [(0,), (0,), (0,)]
    return y, torch.empty_like(h0), torch.empty_like(c0), *(x.new_empty(s, dtype=torch.float16) for s in shapes)


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
    need_fill_h: bool,
    need_fill_c: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dh0, dc0, d_fill_h, d_fill_c, dw_ih, dw_hh, db; those not needed are empty."""
    batch, hidden = h0.shape
    count, inputs = packed.shape[0], w_ih.shape[1]
    steps = count // batch
    dy, dh_n, dc_n = (None if g is None else g.contiguous() for g in (dy, dh_n, dc_n))
    amax = gradient_amax(dy, dh_n, dc_n)
    d_gates = torch.empty_like(gates)
    dh0, dc0 = torch.empty_like(h0), torch.empty_like(h0)
    padded, rows, warps = recurrence_tile(hidden, batch)
    programs = triton.cdiv(batch, rows)
    fill_h, fill_c = (
        torch.empty(programs, hidden, dtype=torch.float32, device=h0.device) if needed else None
        for needed in (need_fill_h, need_fill_c)
    )
    lstm_backward_kernel[(programs,)](
        gates, c_in, w_hh, resets, dy, dh_n, dc_n, amax, d_gates, dh0, dc0, fill_h, fill_c,
        steps, batch, H=hidden, HP=padded, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    dx = torch.empty((steps, batch, inputs) if need_dx else (0,), dtype=x_dtype, device=h0.device)
    if need_dx:
        convert(torch.mm(d_gates, w_ih.to(torch.float16)), dx.view(count, inputs), amax)
    dw = mm_fp32(d_gates.t(), packed)
    dw_ih, dw_hh = torch.empty_like(w_ih), torch.empty_like(w_hh)
    first, _ = pack_width(inputs, hidden)
    convert(dw[:, :inputs], dw_ih, amax)
    convert(dw[:, first : first + hidden], dw_hh, amax)
    db = torch.empty(1, 4 * hidden, dtype=w_ih.dtype, device=h0.device)
    convert(d_gates.sum(0, keepdim=True, dtype=torch.float32), db, amax)
    empty = h0.new_empty(0)
    d_fill_h = empty if fill_h is None else fill_h.sum(0)
    d_fill_c = empty.clone() if fill_c is None else fill_c.sum(0)
    return dx, dh0, dc0, d_fill_h, d_fill_c, dw_ih, dw_hh, db[0].clone()


@gpu_lstm_backward.register_fake
def _(dy, dh_n, dc_n, packed, gates, c_in, h0, resets, w_ih, w_hh, x_dtype, need_dx, need_fill_h, need_fill_c):  # type: ignore[no-untyped-def]
    batch, hidden = h0.shape
    dx_shape = (packed.shape[0] // batch, batch, w_ih.shape[1]) if need_dx else (0,)
    return (
        h0.new_empty(dx_shape, dtype=x_dtype),
        torch.empty_like(h0),
        torch.empty_like(h0),
        h0.new_empty(hidden if need_fill_h else 0, dtype=torch.float32 if need_fill_h else h0.dtype),
        h0.new_empty(hidden if need_fill_c else 0, dtype=torch.float32 if need_fill_c else h0.dtype),
        torch.empty_like(w_ih),
        torch.empty_like(w_hh),
        w_ih.new_empty(4 * hidden),
    )


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, h0, _, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, _, _ = inputs
    packed, gates, c_in = output[3:]
    ctx.save_for_backward(packed, gates, c_in, h0, resets, w_ih, w_hh)
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype
    ctx.dtypes = [None if p is None else p.dtype for p in (fill_h, fill_c, b_ih, b_hh)]


def _backward(ctx, dy, dh_n, dc_n, *_saved):  # type: ignore[no-untyped-def]
    if dy is None and dh_n is None and dc_n is None:
        return (None,) * 12
    packed, gates, c_in, h0, resets, w_ih, w_hh = ctx.saved_tensors
    need = ctx.needs_input_grad
    fill_h, fill_c, b_ih, b_hh = ctx.dtypes
    dx, dh0, dc0, d_fill_h, d_fill_c, dw_ih, dw_hh, db = gpu_lstm_backward(
        dy, dh_n, dc_n, packed, gates, c_in, h0, resets, w_ih, w_hh, ctx.x_dtype, need[0], need[4], need[5]
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
