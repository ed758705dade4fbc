"""Whole LSTM and GRU layers on NVIDIA GPUs: launches the CUDA kernels of this folder and the products between them.

For hidden sizes that are multiples of 8, from 16 to 1024, on compute capability 8.0 and above; `padding.py` pads others to
one. A plan (`plans.py`) holds what follows from sizes and dtypes. A call allocates, passes addresses, and launches the
recurrence as early as it can.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from holdfast.kernels.cuda import cublaslt, nvrtc
from holdfast.kernels.cuda.kernels import address, bias_like, limits, ready, vector
from holdfast.kernels.cuda.padding import padded_size
from holdfast.kernels.cuda.plans import Saved, backward_plan, forward_plan
from holdfast.kernels.cuda.tiles import tile_for
from holdfast.kernels.operands import Gradients, Resets, Weights


@functools.cache
def _supports(gates: int, hidden_size: int, device: int) -> bool:
    if hidden_size != padded_size(hidden_size) or hidden_size > 1024:
        return False
    if not (nvrtc.is_available() and cublaslt.is_available()):
        return False
    processors, shared, capability = limits(device)
    batches = (1, 300, 1000, 3000)  # one per size class of the table
    tiles = (tile_for(gates, hidden_size, b, d, processors, shared) for b in batches for d in (False, True))
    return capability >= 80 and all(tiles)


@nvrtc.constant_when_compiled
def supports(gates: int, hidden_size: int, device: int) -> bool:
    """Whether these kernels can take this hidden size on this CUDA device, with any batch."""
    return _supports(gates, hidden_size, device)


def _state(tensor: Tensor) -> Tensor:
    return ready(tensor if tensor.dtype == torch.float32 else tensor.float())


def forward(
    x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """y, h_n, c_n (None for a GRU) and, with `save`, what the backward needs (`plans.kept_layout`)."""
    device = x.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return forward(x, h0, c0, resets, weights, save)
    mask, reset_h, reset_c, _ = resets
    w_ih, w_hh, b_ih, b_hh = weights
    steps, batch, inputs = x.shape
    gate_rows, hidden = w_hh.shape
    plan = forward_plan(
        gate_rows, hidden, inputs, steps, batch, x.dtype, w_ih.dtype, mask is not None,
        reset_h is not None or reset_c is not None, save, device,
    )  # fmt: skip
    where, stream = x.device, torch._C._cuda_getCurrentRawStream(device)
    x, w_ih, w_hh, start = ready(x), ready(w_ih), ready(w_hh), _state(h0)
    carry_start = start if c0 is None else _state(c0)  # what the kernel carries in fp32: c, or a GRU's h

    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=where)
    kept = torch.empty(plan.kept, dtype=torch.float16, device=where) if save else None
    at = scratch.data_ptr()
    packed = at + plan.packed if kept is None else kept.data_ptr()
    w_half, arrivals, gates = at + plan.w_hh, at + plan.arrivals, packed + plan.gates
    plan.prepare(
        stream, x.data_ptr(), packed, w_ih.data_ptr(), at, w_hh.data_ptr(), w_half, arrivals, plan.rows, plan.chunks
    )
    plan.project(stream, packed, at, gates, at + plan.workspace)

    y = torch.empty(steps, batch, hidden, dtype=x.dtype, device=where)
    h_n = torch.empty_like(start)
    c_n = None if c0 is None else torch.empty_like(start)
    b_ih, b_hh, mask = bias_like(b_ih, w_ih), bias_like(b_hh, w_ih), None if mask is None else mask.contiguous()
    reset_h, reset_c = vector(reset_h), vector(reset_c)
    h_in, stride = (at + plan.slots, hidden) if kept is None else (packed + plan.h_in, plan.width)
    plan.recur(
        stream, gates, w_half, address(b_ih), address(b_hh), start.data_ptr(), carry_start.data_ptr(), h_n.data_ptr(),
        (h_n if c_n is None else c_n).data_ptr(), address(mask), address(reset_h), address(reset_c), y.data_ptr(), h_in,
        packed + plan.saved, arrivals, stride, steps, batch, plan.groups, plan.chunks,
    )  # fmt: skip
    if h0.dtype != torch.float32:
        h_n = h_n.to(h0.dtype)
    if c0 is not None and c_n is not None and c0.dtype != torch.float32:
        c_n = c_n.to(c0.dtype)
    return y, h_n, c_n, kept


def backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    saved: Saved,
    need_x: bool,
    need_state: bool,
    need_reset: bool,
) -> Gradients:
    """All gradients from those of y, h_n and c_n (None where absent). Weights always get theirs."""
    kept, mask, w_ih, w_hh, batch, state_dtype, x_dtype = saved
    device = kept.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return backward(dy, dh_n, dc_n, saved, need_x, need_state, need_reset)
    gate_rows, hidden = w_hh.shape
    inputs, lstm = w_ih.shape[1], gate_rows == 4 * hidden
    plan = backward_plan(
        gate_rows, hidden, inputs, kept.shape[0], batch, x_dtype, w_ih.dtype, mask is not None, need_reset, need_x, device,
    )  # fmt: skip
    where, stream, rows = kept.device, torch._C._cuda_getCurrentRawStream(device), plan.rows
    dy = None if dy is None else ready(dy)
    dh_n, dc_n = None if dh_n is None else _state(dh_n), None if dc_n is None else _state(dc_n)
    w_ih, w_hh, mask = ready(w_ih), ready(w_hh), None if mask is None else mask.contiguous()

    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=where)
    dh0 = torch.empty(batch, hidden, dtype=torch.float32, device=where) if need_state else None
    dc0 = torch.empty_like(dh0) if lstm and dh0 is not None else None
    at, packed = scratch.data_ptr(), kept.data_ptr()
    maxima, arrivals, bias_sums, d_gates = at + plan.maxima, at + plan.arrivals, at + plan.bias_sums, at + plan.d_gates
    d_outputs = address(dy), address(dh_n), address(dc_n)
    plan.prepare(
        stream, *d_outputs, maxima, w_ih.data_ptr(), at, w_hh.data_ptr(), at + plan.w_t, arrivals, rows, batch,
        plan.counters,
    )  # fmt: skip
    plan.recur(
        stream, packed + plan.gates, packed + plan.saved, packed + plan.h_in, at + plan.w_t, address(mask), *d_outputs,
        maxima, d_gates, at + plan.dh0 if dh0 is None else dh0.data_ptr(), at + plan.dc0 if dc0 is None else dc0.data_ptr(),
        bias_sums, at + plan.reset_h, at + plan.reset_c, arrivals, plan.width, plan.steps, batch, plan.groups, plan.chunks,
        plan.blocks,
    )  # fmt: skip

    dx = torch.empty(plan.steps, batch, inputs, dtype=x_dtype, device=where) if need_x else None
    if dx is not None:
        if plan.dx:
            plan.inputs_product(stream, d_gates, at, at + plan.dx, at + plan.workspace)
        else:
            plan.inputs_product(stream, d_gates, at, dx.data_ptr(), at + plan.workspace, at + plan.factor)
    plan.weights_product(stream, d_gates, packed, at + plan.dw, at + plan.workspace)
    dw_ih, dw_hh = torch.empty_like(w_ih), torch.empty_like(w_hh)
    db_ih, db_hh = w_ih.new_empty(gate_rows), w_ih.new_empty(gate_rows)
    d_reset_h = torch.empty(hidden, dtype=torch.float32, device=where) if need_reset else None
    d_reset_c = torch.empty_like(d_reset_h) if lstm and d_reset_h is not None else None
    plan.finish(
        stream, maxima, at + plan.dx if plan.dx and need_x else 0, address(dx), at + plan.dw, dw_ih.data_ptr(),
        dw_hh.data_ptr(), bias_sums, db_ih.data_ptr(), db_hh.data_ptr(), at + plan.reset_h if need_reset else 0,
        at + plan.reset_c if need_reset else 0, address(d_reset_h), address(d_reset_c), rows, plan.partials, plan.blocks,
    )  # fmt: skip
    if dh0 is not None and state_dtype != torch.float32:
        dh0, dc0 = dh0.to(state_dtype), None if dc0 is None else dc0.to(state_dtype)
    return Gradients(dx, dh0, dc0, d_reset_h, d_reset_c, dw_ih, dw_hh, db_ih, db_hh)
