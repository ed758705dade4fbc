"""Whole LSTM and GRU layers on NVIDIA GPUs: launches the CUDA kernels beside this file and the products between them.

For hidden sizes that are multiples of 8, from 16 to 1024, on compute capability 8.0 and above. What sizes decide is in a
plan (`cuda_plans.py`); a call allocates, passes addresses, and gets the recurrence on its way before anything else.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from holdfast.kernels.cuda import cublaslt as cuda_products
from holdfast.kernels.cuda import nvrtc
from holdfast.kernels.cuda import tiles as cuda_tiles
from holdfast.kernels.cuda.kernels import address, bias_like, limits, ready, vector
from holdfast.kernels.cuda.plans import backward_plan, forward_plan
from holdfast.kernels.fp16_layout import Gradients


@functools.cache
def _supports(gates: int, hidden_size: int, device: int) -> bool:
    if hidden_size % 8 or not 16 <= hidden_size <= 1024:
        return False
    if not (nvrtc.is_available() and cuda_products.is_available()):
        return False
    processors, shared, capability = limits(device)
    batches = (1, 300, 1000, 3000)  # one of each class of the table
    tiles = (cuda_tiles.tile_for(gates, hidden_size, b, d, processors, shared) for b in batches for d in (False, True))
    return capability >= 80 and all(tiles)


@nvrtc.constant_when_compiled
def supports(gates: int, hidden_size: int, device: int) -> bool:
    """Whether these kernels can take this hidden size on this CUDA device, with any batch."""
    return _supports(gates, hidden_size, device)


def _state(tensor: Tensor) -> Tensor:
    return ready(tensor if tensor.dtype == torch.float32 else tensor.float())


def forward(
    x: Tensor,
    h0: Tensor,
    carry0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """y, h_n, the other final state, and with `save` what the backward needs (`half_products.kept_layout`).

    carry0 and the other final state are c for the LSTM; the GRU passes h0 again.
    """
    device = x.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return forward(x, h0, carry0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, save)
    steps, batch, inputs = x.shape
    gate_rows, hidden = w_hh.shape
    plan = forward_plan(
        gate_rows, hidden, inputs, steps, batch, x.dtype, w_ih.dtype, resets is not None,
        fill_h is not None or fill_c is not None, save, device,
    )  # fmt: skip
    where, stream = x.device, torch._C._cuda_getCurrentRawStream(device)
    x, w_ih, w_hh, start = ready(x), ready(w_ih), ready(w_hh), _state(h0)
    gru = carry0 is h0 and gate_rows == 3 * hidden
    carry_start = start if carry0 is h0 else _state(carry0)

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
    carry = h_n if gru else torch.empty_like(start)
    b_ih, b_hh, resets = bias_like(b_ih, w_ih), bias_like(b_hh, w_ih), None if resets is None else resets.contiguous()
    fill_h, fill_c = vector(fill_h), vector(fill_c)
    h_in, stride = (at + plan.slots, hidden) if kept is None else (packed + plan.h_in, plan.width)
    plan.recur(
        stream, gates, w_half, address(b_ih), address(b_hh), start.data_ptr(), carry_start.data_ptr(), h_n.data_ptr(),
        carry.data_ptr(), address(resets), address(fill_h), address(fill_c), y.data_ptr(), h_in, packed + plan.saved,
        arrivals, stride, steps, batch, plan.groups, plan.chunks,
    )  # fmt: skip
    if h0.dtype != torch.float32 or carry0.dtype != torch.float32:
        h_n, carry = h_n.to(h0.dtype), carry.to(carry0.dtype)
    return y, h_n, carry, kept


def backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    kept: Tensor,
    resets: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    batch: int,
    state_dtype: torch.dtype,
    x_dtype: torch.dtype,
    need_dx: bool,
    need_state: bool,
    fill: bool,
) -> Gradients:
    """All gradients from those of y, h_n and c_n (None where absent) and what `forward` kept."""
    device = kept.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return backward(
                dy, dh_n, dc_n, kept, resets, w_ih, w_hh, batch, state_dtype, x_dtype, need_dx, need_state, fill
            )
    gate_rows, hidden = w_hh.shape
    inputs = w_ih.shape[1]
    plan = backward_plan(
        gate_rows, hidden, inputs, kept.shape[0], batch, x_dtype, w_ih.dtype, resets is not None, fill, need_dx, device
    )
    where, stream, rows = kept.device, torch._C._cuda_getCurrentRawStream(device), plan.rows
    dy = None if dy is None else ready(dy)
    dh_n, dc_n = None if dh_n is None else _state(dh_n), None if dc_n is None else _state(dc_n)
    w_ih, w_hh, resets = ready(w_ih), ready(w_hh), None if resets is None else resets.contiguous()

    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=where)
    dh0 = torch.empty(batch, hidden, dtype=torch.float32, device=where) if need_state else None
    dc0 = None if dh0 is None else torch.empty_like(dh0)
    at, packed = scratch.data_ptr(), kept.data_ptr()
    maxima, arrivals, bias_sums, d_gates = at + plan.maxima, at + plan.arrivals, at + plan.bias_sums, at + plan.d_gates
    d_outputs = address(dy), address(dh_n), address(dc_n)
    plan.prepare(
        stream, *d_outputs, maxima, w_ih.data_ptr(), at, w_hh.data_ptr(), at + plan.w_t, arrivals, rows, batch,
        plan.chunks,
    )  # fmt: skip
    plan.recur(
        stream, packed + plan.gates, packed + plan.saved, packed + plan.h_in, at + plan.w_t, address(resets), *d_outputs,
        maxima, d_gates, at + plan.dh0 if dh0 is None else dh0.data_ptr(), at + plan.dc0 if dc0 is None else dc0.data_ptr(),
        bias_sums, at + plan.fill_h, at + plan.fill_c, arrivals, plan.width, plan.steps, batch, plan.groups, plan.chunks,
        plan.blocks,
    )  # fmt: skip

    dx = torch.empty(plan.steps, batch, inputs, dtype=x_dtype, device=where) if need_dx else None
    if dx is not None:
        plan.inputs_product(stream, d_gates, at, at + plan.dx, at + plan.workspace)
    plan.weights_product(stream, d_gates, packed, at + plan.dw, at + plan.workspace)
    dw_ih, dw_hh = torch.empty_like(w_ih), torch.empty_like(w_hh)
    db_ih, db_hh = w_ih.new_empty(gate_rows), w_ih.new_empty(gate_rows)
    d_fill_h = torch.empty(hidden, dtype=torch.float32, device=where) if fill else None
    d_fill_c = None if d_fill_h is None else torch.empty_like(d_fill_h)
    plan.finish(
        stream, maxima, at + plan.dx if need_dx else 0, address(dx), at + plan.dw, dw_ih.data_ptr(), dw_hh.data_ptr(),
        bias_sums, db_ih.data_ptr(), db_hh.data_ptr(), at + plan.fill_h if fill else 0, at + plan.fill_c if fill else 0,
        address(d_fill_h), address(d_fill_c), rows, plan.partials, plan.blocks,
    )  # fmt: skip
    if dh0 is not None and dc0 is not None and state_dtype != torch.float32:
        dh0, dc0 = dh0.to(state_dtype), dc0.to(state_dtype)
    return Gradients(dx, dh0, dc0, d_fill_h, d_fill_c, dw_ih, dw_hh, db_ih, db_hh)
