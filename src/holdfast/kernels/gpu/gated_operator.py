"""Operators and autograd of one LSTM or GRU layer on a GPU, around `kernels/cuda`. A GRU is a call with c0 = None.

There are two entry points to one implementation: operators that torch.compile sees as single nodes and, in eager mode,
an autograd function, because at small sizes calling an operator written in Python takes longer than the kernels do.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.cuda import gated_layer
from holdfast.kernels.cuda.fp16_layout import Saved, kept_layout
from holdfast.kernels.cuda.padding import padded_size, run_padded
from holdfast.kernels.operands import Gradients, Resets, Weights, refuse_second_derivative

_NO_RESETS = Resets()
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(gates: int, x: Tensor, hidden_size: int, state_dtype: torch.dtype) -> bool:
    """Whether the CUDA kernels take this layer: sizes, dtypes and device. gates: 4 for an LSTM, 3 for a GRU."""
    if x.dtype not in _DTYPES or state_dtype not in _DTYPES or x.numel() == 0 or not x.is_cuda:
        return False
    return gated_layer.supports(gates, padded_size(hidden_size), x.get_device())


def _forward(x, h0, c0, resets, weights, save):
    """y, h_n, c_n (None for a GRU) and, with `save`, the tensor of `fp16_layout.kept_layout`."""
    if resets.mask is None or resets.detach:  # "detach" concerns the backward only
        resets = _NO_RESETS
    return gated_layer.forward(x, h0, c0, resets, weights, save)


@torch.library.custom_op("holdfast::gpu_recurrence", mutates_args=())
def gpu_recurrence(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    mask: Tensor | None,
    reset_h: Tensor | None,
    reset_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    detach_at_reset: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, h_n, c_n (empty for a GRU) and what the backward needs (empty without `save`)."""
    resets, weights = Resets(mask, reset_h, reset_c, detach_at_reset), Weights(w_ih, w_hh, b_ih, b_hh)
    y, h_n, c_n, kept = _forward(x, h0, c0, resets, weights, save)
    return y, h_n, _empty(h0) if c_n is None else c_n, _empty(h0, torch.float16) if kept is None else kept


@gpu_recurrence.register_fake
def _(x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, detach_at_reset, save):
    steps, batch, inputs = x.shape
    gate_rows, hidden = w_hh.shape
    size = kept_layout(steps * batch, inputs, hidden, gate_rows // hidden)[2] if save else 0
    c_n = _empty(h0) if c0 is None else c0.new_empty(batch, hidden)
    kept = h0.new_empty(size, dtype=torch.float16)
    return x.new_empty(steps, batch, hidden), h0.new_empty(batch, hidden), c_n, kept


@torch.library.custom_op("holdfast::gpu_recurrence_backward", mutates_args=())
def gpu_recurrence_backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    kept: Tensor,
    h0: Tensor,
    mask: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    x_dtype: torch.dtype,
    need_x: bool,
    need_state: bool,
    need_reset: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`Gradients`, with empty tensors for those that are None."""
    saved = Saved(kept, mask, w_ih, w_hh, h0.shape[0], h0.dtype, x_dtype)
    gradients = gated_layer.backward(dy, dh_n, dc_n, saved, need_x, need_state, need_reset)
    return tuple(_empty(h0) if g is None else g for g in gradients)  # type: ignore[return-value]


@gpu_recurrence_backward.register_fake
def _(dy, dh_n, dc_n, kept, h0, mask, w_ih, w_hh, x_dtype, need_x, need_state, need_reset):
    (batch, hidden), (gate_rows, inputs) = h0.shape, w_ih.shape
    lstm = gate_rows == 4 * hidden
    steps = kept.shape[0] // kept_layout(batch, inputs, hidden, gate_rows // hidden)[2]
    return (
        h0.new_empty(steps, batch, inputs, dtype=x_dtype) if need_x else _empty(h0),
        h0.new_empty(batch, hidden) if need_state else _empty(h0),
        h0.new_empty(batch, hidden) if need_state and lstm else _empty(h0),
        h0.new_empty(hidden, dtype=torch.float32) if need_reset else _empty(h0),
        h0.new_empty(hidden, dtype=torch.float32) if need_reset and lstm else _empty(h0),
        *(w_ih.new_empty(gate_rows, columns) for columns in (inputs, hidden)),
        *(w_ih.new_empty(gate_rows) for _ in range(2)),
    )


def _empty(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return like.new_empty(0, dtype=dtype)


def _setup_operator(ctx, inputs, output):
    x, h0, _, mask, _, _, w_ih, w_hh, *_ = inputs
    ctx.save_for_backward(output[3], h0, mask, w_ih, w_hh)
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype


def _operator_backward(ctx, dy, dh_n, dc_n, *_kept):
    if dy is None and dh_n is None and dc_n is None:
        return (None,) * 12
    flags = ctx.needs_input_grad
    needs = flags[0], flags[1] or flags[2], flags[4] or flags[5]
    gradients = gpu_recurrence_backward(dy, dh_n, dc_n, *ctx.saved_tensors, ctx.x_dtype, *needs)
    return Gradients(*gradients).of_inputs(flags)


gpu_recurrence.register_autograd(_operator_backward, setup_context=_setup_operator)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, detach_at_reset, save):
        resets, weights = Resets(mask, reset_h, reset_c, detach_at_reset), Weights(w_ih, w_hh, b_ih, b_hh)
        y, h_n, c_n, kept = _forward(x, h0, c0, resets, weights, save)
        ctx.save_for_backward(kept, mask, w_ih, w_hh)
        ctx.set_materialize_grads(False)
        ctx.sizes = h0.shape[0], h0.dtype, x.dtype
        return y, h_n, c_n

    @staticmethod
    def backward(ctx, dy, dh_n, dc_n):
        refuse_second_derivative()
        if dy is None and dh_n is None and dc_n is None:
            return (None,) * 12
        flags, saved = ctx.needs_input_grad, Saved(*ctx.saved_tensors, *ctx.sizes)
        needs = flags[0], flags[1] or flags[2], flags[4] or flags[5]
        return gated_layer.backward(dy, dh_n, dc_n, saved, *needs).of_inputs(flags)


# What Function.apply does when no functorch transform is active; its checks cost as much as a launch.
_apply = super(torch.autograd.Function, _Eager).apply


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    for tensor in tensors:  # noqa: SIM110 a loop that stops at the first is cheaper than any() of a generator
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def sequence(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights):
    """y, h_n, c_n (None, or empty under torch.compile, for a GRU). Other hidden sizes are padded to one that the kernels take."""
    hidden = h0.shape[1]
    if hidden == padded_size(hidden):
        return _sequence(x, h0, c0, resets, weights)
    return run_padded(_sequence, x, h0, c0, resets, weights)


def _sequence(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights):
    mask, reset_h, reset_c, detach = resets
    w_ih, w_hh, b_ih, b_hh = weights
    if mask is None or detach:
        reset_h = reset_c = None
    save = torch.is_grad_enabled() and _any_requires_grad(w_hh, w_ih, x, h0, c0, b_ih, b_hh, reset_h, reset_c)
    flat = (x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, detach, save)
    if torch.compiler.is_compiling():
        return gpu_recurrence(*flat)[:3]
    if save:
        plain = not torch._C._are_functorch_transforms_active()
        return _apply(*flat) if plain else _Eager.apply(*flat)
    return _forward(x, h0, c0, resets, weights, False)[:3]
