"""One LSTM layer on a GPU, behind the signature of `reference.lstm`.

Two ways in, one implementation: operators that torch.compile sees as single nodes, and, in eager mode, an autograd
function, because calling an operator written in Python costs more than the kernels take at small sizes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.gpu_backend import backend
from holdfast.kernels.half_products import packed_layout


def _forward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save):
    run = backend(4, h0.shape[1], x.device).forward
    return run(x, h0, c0, None if cut else resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, save)


def _backward(dy, dh_n, dc_n, packed, gates, c_in, h0, resets, w_ih, w_hh, x_dtype, need_dx, fill):
    run = backend(4, h0.shape[1], h0.device).backward
    return run(dy, dh_n, dc_n, packed, gates, c_in, h0, resets, w_ih, w_hh, x_dtype, need_dx, fill)


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
    return _forward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save)


@gpu_lstm.register_fake
def _(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, save):
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    widths = (packed_layout(inputs, hidden)[1], 4 * hidden, hidden)
    buffers = (x.new_empty((steps * batch, n) if save else (0,), dtype=torch.float16) for n in widths)
    return x.new_empty(steps, batch, hidden), h0.new_empty(batch, hidden), c0.new_empty(batch, hidden), *buffers


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `half_products.Gradients`; dx and the fills' are empty when not needed."""
    gradients = _backward(dy, dh_n, dc_n, packed, gates, c_in, h0, resets, w_ih, w_hh, x_dtype, need_dx, fill)
    return tuple(h0.new_empty(0, dtype=torch.float32) if g is None else g for g in gradients)  # type: ignore[return-value]


@gpu_lstm_backward.register_fake
def _(dy, dh_n, dc_n, packed, gates, c_in, h0, resets, w_ih, w_hh, x_dtype, need_dx, fill):
    batch, hidden = h0.shape
    steps, inputs = packed.shape[0] // batch, w_ih.shape[1]
    return (
        h0.new_empty((steps, batch, inputs) if need_dx else (0,), dtype=x_dtype if need_dx else torch.float32),
        *(h0.new_empty(batch, hidden) for _ in range(2)),
        *(h0.new_empty(hidden if fill else 0, dtype=torch.float32) for _ in range(2)),
        *(w_ih.new_empty(4 * hidden, n) for n in (inputs, hidden)),
        *(w_ih.new_empty(4 * hidden) for _ in range(2)),
    )


def _setup_context(ctx, inputs, output):
    x, h0, _, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, _, _ = inputs
    ctx.save_for_backward(*output[3:], h0, resets, w_ih, w_hh)
    ctx.set_materialize_grads(False)
    ctx.dtypes = (x.dtype, *(None if p is None else p.dtype for p in (fill_h, fill_c, b_ih, b_hh)))


def _gradients(ctx, run, dy, dh_n, dc_n):
    if dy is None and dh_n is None and dc_n is None:
        return (None,) * 12
    need = ctx.needs_input_grad
    x, fill_h, fill_c, b_ih, b_hh = ctx.dtypes
    dx, dh0, dc0, d_fill_h, d_fill_c, dw_ih, dw_hh, db_ih, db_hh = run(
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
        None if b_ih is None else db_ih.to(b_ih),
        None if b_hh is None else db_hh.to(b_hh),
        None,
        None,
    )


def _operator_backward(ctx, dy, dh_n, dc_n, *_buffers):
    return _gradients(ctx, gpu_lstm_backward, dy, dh_n, dc_n)


gpu_lstm.register_autograd(_operator_backward, setup_context=_setup_context)


class _EagerLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[:3]

    @staticmethod
    def backward(ctx, dy, dh_n, dc_n):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the GPU kernels have no second derivative (backward was called with create_graph=True); "
                'use kernel="reference"'
            )
        return _gradients(ctx, _backward, dy, dh_n, dc_n)


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
