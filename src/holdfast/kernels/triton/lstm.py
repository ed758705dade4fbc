"""LSTM recurrence, forward and backward, in Triton: one program per tile of batch rows, all steps in one launch.

For hidden sizes up to 128. W_hh stays on chip as fp16 for the whole sequence; h and c are carried in fp32. Masks pad
the hidden size to a power of two.

Buffers of one layer, rows r = t * B + b: `gates` [T*B, 4H] fp16 holds the input's pre-activations and is overwritten with
the activated gates i, f, g, o; `h_in` and `saved` [T*B, H] fp16 receive h and c before each step, after its reset.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.operands import Resets, Weights
from holdfast.kernels.triton.elements import load_gate_bias, load_reset_value, scale_from_amax, tanh
from holdfast.kernels.triton.tiles import recurrence_tile


@triton.jit(do_not_specialize=["steps", "batch"])
def lstm_forward_kernel(
    gates, w_hh, b_ih, b_hh, h0, c0, resets, reset_h, reset_c, y, h_n, c_n, h_in, saved, steps, batch, h_in_stride,
    H: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, HP)
    row_ok, unit_ok = row < batch, unit < H
    ok = row_ok[:, None] & unit_ok[None, :]
    state_at = row[:, None] * H + unit[None, :]
    gates_at = row[:, None] * (4 * H) + unit[None, :]
    h_in_at = row[:, None].to(tl.int64) * h_in_stride + unit[None, :]

    # [K = unit read, N = unit written]
    w_ok = unit_ok[:, None] & unit_ok[None, :]
    w_at = w_hh + unit[None, :] * H + unit[:, None]
    w_i = tl.load(w_at, mask=w_ok, other=0.0).to(tl.float16)
    w_f = tl.load(w_at + H * H, mask=w_ok, other=0.0).to(tl.float16)
    w_g = tl.load(w_at + 2 * H * H, mask=w_ok, other=0.0).to(tl.float16)
    w_o = tl.load(w_at + 3 * H * H, mask=w_ok, other=0.0).to(tl.float16)
    bias_i = load_gate_bias(b_ih, 0, unit, unit_ok) + load_gate_bias(b_hh, 0, unit, unit_ok)
    bias_f = load_gate_bias(b_ih, H, unit, unit_ok) + load_gate_bias(b_hh, H, unit, unit_ok)
    bias_g = load_gate_bias(b_ih, 2 * H, unit, unit_ok) + load_gate_bias(b_hh, 2 * H, unit, unit_ok)
    bias_o = load_gate_bias(b_ih, 3 * H, unit, unit_ok) + load_gate_bias(b_hh, 3 * H, unit, unit_ok)
    value_h = load_reset_value(reset_h, unit, unit_ok)
    value_c = load_reset_value(reset_c, unit, unit_ok)

    h = tl.load(h0 + state_at, mask=ok, other=0.0).to(tl.float32)
    c = tl.load(c0 + state_at, mask=ok, other=0.0).to(tl.float32)
    next_i = tl.load(gates + gates_at, mask=ok, other=0.0)
    next_f = tl.load(gates + gates_at + H, mask=ok, other=0.0)
    next_g = tl.load(gates + gates_at + 2 * H, mask=ok, other=0.0)
    next_o = tl.load(gates + gates_at + 3 * H, mask=ok, other=0.0)
    first = tl.full((), 0, tl.int64)  # row of (t, 0)
    total = tl.full((), 1, tl.int64) * steps * batch
    for _ in range(steps):
        here = gates + first * (4 * H) + gates_at
        pre_i, pre_f = next_i.to(tl.float32) + bias_i, next_f.to(tl.float32) + bias_f
        pre_g, pre_o = next_g.to(tl.float32) + bias_g, next_o.to(tl.float32) + bias_o
        # The next step's loads start before this step's products.
        ahead = here + batch * (4 * H)
        ahead_ok = ok & (first + row[:, None] < total - batch)
        next_i = tl.load(ahead, mask=ahead_ok, other=0.0)
        next_f = tl.load(ahead + H, mask=ahead_ok, other=0.0)
        next_g = tl.load(ahead + 2 * H, mask=ahead_ok, other=0.0)
        next_o = tl.load(ahead + 3 * H, mask=ahead_ok, other=0.0)
        if resets is not None:
            reset = tl.load(resets + first + row, mask=row_ok, other=0)[:, None] != 0
            h = tl.where(reset, value_h, h)
            c = tl.where(reset, value_c, c)
        h_half = h.to(tl.float16)
        if SAVE:
            tl.store(h_in + first * h_in_stride + h_in_at, h_half, mask=ok)
            tl.store(saved + first * H + state_at, c.to(tl.float16), mask=ok)
        i = tl.sigmoid(tl.dot(h_half, w_i, pre_i))
        f = tl.sigmoid(tl.dot(h_half, w_f, pre_f))
        g = tanh(tl.dot(h_half, w_g, pre_g))
        o = tl.sigmoid(tl.dot(h_half, w_o, pre_o))
        c = f * c + i * g
        h = o * tanh(c)
        if SAVE:
            tl.store(here, i.to(tl.float16), mask=ok)
            tl.store(here + H, f.to(tl.float16), mask=ok)
            tl.store(here + 2 * H, g.to(tl.float16), mask=ok)
            tl.store(here + 3 * H, o.to(tl.float16), mask=ok)
        tl.store(y + first * H + state_at, h.to(y.dtype.element_ty), mask=ok)
        first += batch
    tl.store(h_n + state_at, h, mask=ok)
    tl.store(c_n + state_at, c, mask=ok)


@triton.jit(do_not_specialize=["steps", "batch"])
def lstm_backward_kernel(
    gates, saved, w_hh, resets, dy, dh_n, dc_n, amax_bits, d_gates, dh0, dc0, d_reset_h, d_reset_c, steps, batch,
    H: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Steps from the last to the first. `d_gates` [T*B, 4H] fp16 is scaled; dh0, dc0 and the partial sums of
    the reset values' gradients [programs, H] are not."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, HP)
    row_ok, unit_ok = row < batch, unit < H
    ok = row_ok[:, None] & unit_ok[None, :]
    state_at = row[:, None] * H + unit[None, :]
    gates_at = row[:, None] * (4 * H) + unit[None, :]
    scale, inverse = scale_from_amax(tl.load(amax_bits))

    # [K = gate unit, N = unit read]
    w_ok = unit_ok[:, None] & unit_ok[None, :]
    w_at = w_hh + unit[:, None] * H + unit[None, :]
    w_i = tl.load(w_at, mask=w_ok, other=0.0).to(tl.float16)
    w_f = tl.load(w_at + H * H, mask=w_ok, other=0.0).to(tl.float16)
    w_g = tl.load(w_at + 2 * H * H, mask=w_ok, other=0.0).to(tl.float16)
    w_o = tl.load(w_at + 3 * H * H, mask=w_ok, other=0.0).to(tl.float16)

    dh = tl.zeros([ROWS, HP], tl.float32)
    dc = tl.zeros([ROWS, HP], tl.float32)
    if dh_n is not None:
        dh += tl.load(dh_n + state_at, mask=ok, other=0.0).to(tl.float32) * scale
    if dc_n is not None:
        dc += tl.load(dc_n + state_at, mask=ok, other=0.0).to(tl.float32) * scale
    sum_h = tl.zeros([ROWS, HP], tl.float32)
    sum_c = tl.zeros([ROWS, HP], tl.float32)

    first = tl.full((), 1, tl.int64) * (steps - 1) * batch  # row of (t, 0)
    ahead = gates + first * (4 * H) + gates_at
    next_i = tl.load(ahead, mask=ok, other=0.0)
    next_f = tl.load(ahead + H, mask=ok, other=0.0)
    next_g = tl.load(ahead + 2 * H, mask=ok, other=0.0)
    next_o = tl.load(ahead + 3 * H, mask=ok, other=0.0)
    next_c = tl.load(saved + first * H + state_at, mask=ok, other=0.0)
    next_dy = tl.zeros([ROWS, HP], tl.float32)
    if dy is not None:
        next_dy = tl.load(dy + first * H + state_at, mask=ok, other=0.0).to(tl.float32)
    for _ in range(steps):
        i, f = next_i.to(tl.float32), next_f.to(tl.float32)
        g, o = next_g.to(tl.float32), next_o.to(tl.float32)
        c_before = next_c.to(tl.float32)
        dh += next_dy * scale
        ahead_ok = ok & (first + row[:, None] >= batch)
        ahead = gates + (first - batch) * (4 * H) + gates_at
        next_i = tl.load(ahead, mask=ahead_ok, other=0.0)
        next_f = tl.load(ahead + H, mask=ahead_ok, other=0.0)
        next_g = tl.load(ahead + 2 * H, mask=ahead_ok, other=0.0)
        next_o = tl.load(ahead + 3 * H, mask=ahead_ok, other=0.0)
        next_c = tl.load(saved + (first - batch) * H + state_at, mask=ahead_ok, other=0.0)
        if dy is not None:
            next_dy = tl.load(dy + (first - batch) * H + state_at, mask=ahead_ok, other=0.0).to(tl.float32)

        squashed = tanh(f * c_before + i * g)
        dc += dh * o * (1.0 - squashed * squashed)
        d_i = (dc * g * i * (1.0 - i)).to(tl.float16)
        d_f = (dc * c_before * f * (1.0 - f)).to(tl.float16)
        d_g = (dc * i * (1.0 - g * g)).to(tl.float16)
        d_o = (dh * squashed * o * (1.0 - o)).to(tl.float16)
        here = d_gates + first * (4 * H) + gates_at
        tl.store(here, d_i, mask=ok)
        tl.store(here + H, d_f, mask=ok)
        tl.store(here + 2 * H, d_g, mask=ok)
        tl.store(here + 3 * H, d_o, mask=ok)
        dh = tl.dot(d_i, w_i)
        dh = tl.dot(d_f, w_f, dh)
        dh = tl.dot(d_g, w_g, dh)
        dh = tl.dot(d_o, w_o, dh)
        dc = dc * f
        if resets is not None:
            reset = tl.load(resets + first + row, mask=row_ok, other=0)[:, None] != 0
            if d_reset_h is not None:
                sum_h += tl.where(reset, dh, 0.0)
            if d_reset_c is not None:
                sum_c += tl.where(reset, dc, 0.0)
            dh = tl.where(reset, 0.0, dh)
            dc = tl.where(reset, 0.0, dc)
        first -= batch
    tl.store(dh0 + state_at, dh * inverse, mask=ok)
    tl.store(dc0 + state_at, dc * inverse, mask=ok)
    if d_reset_h is not None:
        tl.store(d_reset_h + tl.program_id(0) * H + unit, tl.sum(sum_h, axis=0) * inverse, mask=unit_ok)
    if d_reset_c is not None:
        tl.store(d_reset_c + tl.program_id(0) * H + unit, tl.sum(sum_c, axis=0) * inverse, mask=unit_ok)


def forward(
    gates: Tensor,
    h0: Tensor,
    c0: Tensor,
    resets: Resets,
    weights: Weights,
    y: Tensor,
    h_in: Tensor,
    saved: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Fills y and, with `save`, h_in, saved and gates; returns h_n and c_n in fp32."""
    steps, batch, hidden = y.shape
    h_n, c_n = torch.empty_like(h0), torch.empty_like(h0)
    padded, rows, warps = recurrence_tile(hidden)
    lstm_forward_kernel[(triton.cdiv(batch, rows),)](
        gates, weights.w_hh, weights.b_ih, weights.b_hh, h0, c0, resets.mask, resets.h, resets.c, y, h_n, c_n, h_in, saved,
        steps, batch, h_in.stride(0), H=hidden, HP=padded, ROWS=rows, SAVE=save, num_warps=warps,
    )  # fmt: skip
    return h_n, c_n


def backward(
    gates: Tensor,
    saved: Tensor,
    h_in: Tensor,
    w_hh: Tensor,
    mask: Tensor | None,
    d_outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    amax_bits: Tensor,
    steps: int,
    need_reset: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """d_gates (scaled fp16), dh0, dc0 and, if needed, the gradients of the reset values: fp32, not scaled."""
    count, hidden = saved.shape
    batch = count // steps
    d_gates = gates.new_empty(count, 4 * hidden)
    dh0, dc0 = (torch.empty(batch, hidden, dtype=torch.float32, device=gates.device) for _ in range(2))
    padded, rows, warps = recurrence_tile(hidden)
    programs = triton.cdiv(batch, rows)
    sums_h, sums_c = (dh0.new_empty(programs, hidden) if need_reset else None for _ in range(2))
    lstm_backward_kernel[(programs,)](
        gates, saved, w_hh, mask, *d_outputs, amax_bits, d_gates, dh0, dc0, sums_h, sums_c, steps, batch,
        H=hidden, HP=padded, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    d_reset_h, d_reset_c = (None if sums is None else sums.sum(0) for sums in (sums_h, sums_c))
    return d_gates, dh0, dc0, d_reset_h, d_reset_c
