"""GRU recurrence, forward and backward, in Triton: one program per tile of batch rows, all steps in one launch.

For hidden sizes up to 128; works as `lstm.py`. `gates` [T*B, 3H] fp16 holds the input's pre-activations and is overwritten
with r, z, n; `h_in` receives h before each step, after its reset, and `saved` receives W_hn h + b_hn.
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
def gru_forward_kernel(
    gates, w_hh, b_ih, b_hh, h0, resets, reset_h, y, h_n, h_in, saved, steps, batch, h_in_stride,
    H: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, HP)
    row_ok, unit_ok = row < batch, unit < H
    ok = row_ok[:, None] & unit_ok[None, :]
    state_at = row[:, None] * H + unit[None, :]
    gates_at = row[:, None] * (3 * H) + unit[None, :]
    h_in_at = row[:, None].to(tl.int64) * h_in_stride + unit[None, :]

    w_ok = unit_ok[:, None] & unit_ok[None, :]  # [K = unit read, N = unit written]
    w_at = w_hh + unit[None, :] * H + unit[:, None]
    w_r = tl.load(w_at, mask=w_ok, other=0.0).to(tl.float16)
    w_z = tl.load(w_at + H * H, mask=w_ok, other=0.0).to(tl.float16)
    w_n = tl.load(w_at + 2 * H * H, mask=w_ok, other=0.0).to(tl.float16)
    bias_r = load_gate_bias(b_ih, 0, unit, unit_ok) + load_gate_bias(b_hh, 0, unit, unit_ok)
    bias_z = load_gate_bias(b_ih, H, unit, unit_ok) + load_gate_bias(b_hh, H, unit, unit_ok)
    bias_xn = load_gate_bias(b_ih, 2 * H, unit, unit_ok)
    bias_hn = load_gate_bias(b_hh, 2 * H, unit, unit_ok) + tl.zeros([ROWS, HP], tl.float32)
    value_h = load_reset_value(reset_h, unit, unit_ok)

    h = tl.load(h0 + state_at, mask=ok, other=0.0).to(tl.float32)
    next_r = tl.load(gates + gates_at, mask=ok, other=0.0)
    next_z = tl.load(gates + gates_at + H, mask=ok, other=0.0)
    next_n = tl.load(gates + gates_at + 2 * H, mask=ok, other=0.0)
    first = tl.full((), 0, tl.int64)  # row of (t, 0)
    total = tl.full((), 1, tl.int64) * steps * batch
    for _ in range(steps):
        here = gates + first * (3 * H) + gates_at
        pre_r, pre_z = next_r.to(tl.float32) + bias_r, next_z.to(tl.float32) + bias_z
        pre_n = next_n.to(tl.float32) + bias_xn
        # The next step's loads start before this step's products.
        ahead = here + batch * (3 * H)
        ahead_ok = ok & (first + row[:, None] < total - batch)
        next_r = tl.load(ahead, mask=ahead_ok, other=0.0)
        next_z = tl.load(ahead + H, mask=ahead_ok, other=0.0)
        next_n = tl.load(ahead + 2 * H, mask=ahead_ok, other=0.0)
        if resets is not None:
            reset = tl.load(resets + first + row, mask=row_ok, other=0)[:, None] != 0
            h = tl.where(reset, value_h, h)
        h_half = h.to(tl.float16)
        hn = tl.dot(h_half, w_n, bias_hn)
        r = tl.sigmoid(tl.dot(h_half, w_r, pre_r))
        z = tl.sigmoid(tl.dot(h_half, w_z, pre_z))
        n = tanh(pre_n + r * hn)
        h = n + z * (h - n)
        if SAVE:
            tl.store(h_in + first * h_in_stride + h_in_at, h_half, mask=ok)
            tl.store(saved + first * H + state_at, hn.to(tl.float16), mask=ok)
            tl.store(here, r.to(tl.float16), mask=ok)
            tl.store(here + H, z.to(tl.float16), mask=ok)
            tl.store(here + 2 * H, n.to(tl.float16), mask=ok)
        tl.store(y + first * H + state_at, h.to(y.dtype.element_ty), mask=ok)
        first += batch
    tl.store(h_n + state_at, h, mask=ok)


@triton.jit(do_not_specialize=["steps", "batch"])
def gru_backward_kernel(
    gates, saved, h_in, w_hh, resets, dy, dh_n, amax_bits, d_gates, dh0, d_reset_h, steps, batch, h_in_stride,
    H: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Steps from the last to the first. `d_gates` [T*B, 4H] fp16, scaled: n, r, z, r * n; the rest is not scaled."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, HP)
    row_ok, unit_ok = row < batch, unit < H
    ok = row_ok[:, None] & unit_ok[None, :]
    state_at = row[:, None] * H + unit[None, :]
    h_in_at = row[:, None].to(tl.int64) * h_in_stride + unit[None, :]
    scale, inverse = scale_from_amax(tl.load(amax_bits))

    w_ok = unit_ok[:, None] & unit_ok[None, :]  # [K = gate unit, N = unit read]
    w_at = w_hh + unit[:, None] * H + unit[None, :]
    w_r = tl.load(w_at, mask=w_ok, other=0.0).to(tl.float16)
    w_z = tl.load(w_at + H * H, mask=w_ok, other=0.0).to(tl.float16)
    w_n = tl.load(w_at + 2 * H * H, mask=w_ok, other=0.0).to(tl.float16)

    dh = tl.zeros([ROWS, HP], tl.float32)
    if dh_n is not None:
        dh += tl.load(dh_n + state_at, mask=ok, other=0.0).to(tl.float32) * scale
    sum_h = tl.zeros([ROWS, HP], tl.float32)
    first = tl.full((), 1, tl.int64) * (steps - 1) * batch  # row of (t, 0)
    for _ in range(steps):
        at = gates + first * (3 * H) + row[:, None] * (3 * H) + unit[None, :]
        r = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        z = tl.load(at + H, mask=ok, other=0.0).to(tl.float32)
        n = tl.load(at + 2 * H, mask=ok, other=0.0).to(tl.float32)
        hn = tl.load(saved + first * H + state_at, mask=ok, other=0.0).to(tl.float32)
        h_before = tl.load(h_in + first * h_in_stride + h_in_at, mask=ok, other=0.0).to(tl.float32)
        if dy is not None:
            dh += tl.load(dy + first * H + state_at, mask=ok, other=0.0).to(tl.float32) * scale
        dn = dh * (1.0 - z) * (1.0 - n * n)
        d_r = (dn * hn * r * (1.0 - r)).to(tl.float16)
        d_z = (dh * (h_before - n) * z * (1.0 - z)).to(tl.float16)
        d_hn = (dn * r).to(tl.float16)
        here = d_gates + first * (4 * H) + row[:, None] * (4 * H) + unit[None, :]
        tl.store(here, dn.to(tl.float16), mask=ok)
        tl.store(here + H, d_r, mask=ok)
        tl.store(here + 2 * H, d_z, mask=ok)
        tl.store(here + 3 * H, d_hn, mask=ok)
        dh = tl.dot(d_r, w_r, dh * z)
        dh = tl.dot(d_z, w_z, dh)
        dh = tl.dot(d_hn, w_n, dh)
        if resets is not None:
            reset = tl.load(resets + first + row, mask=row_ok, other=0)[:, None] != 0
            if d_reset_h is not None:
                sum_h += tl.where(reset, dh, 0.0)
            dh = tl.where(reset, 0.0, dh)
        first -= batch
    tl.store(dh0 + state_at, dh * inverse, mask=ok)
    if d_reset_h is not None:
        tl.store(d_reset_h + tl.program_id(0) * H + unit, tl.sum(sum_h, axis=0) * inverse, mask=unit_ok)


def forward(
    gates: Tensor,
    h0: Tensor,
    c0: None,
    resets: Resets,
    weights: Weights,
    y: Tensor,
    h_in: Tensor,
    saved: Tensor,
    save: bool,
) -> tuple[Tensor, None]:
    """Fills y and, with `save`, h_in, saved and gates; returns h_n in fp32, and None for c_n."""
    steps, batch, hidden = y.shape
    h_n = torch.empty_like(h0)
    padded, rows, warps = recurrence_tile(hidden)
    gru_forward_kernel[(triton.cdiv(batch, rows),)](
        gates, weights.w_hh, weights.b_ih, weights.b_hh, h0, resets.mask, resets.h, y, h_n, h_in, saved, steps, batch,
        h_in.stride(0), H=hidden, HP=padded, ROWS=rows, SAVE=save, num_warps=warps,
    )  # fmt: skip
    return h_n, None


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
) -> tuple[Tensor, Tensor, None, Tensor | None, None]:
    """As `lstm.backward`, with None for dc0 and its reset value."""
    count, hidden = saved.shape
    batch = count // steps
    d_gates = gates.new_empty(count, 4 * hidden)
    dh0 = torch.empty(batch, hidden, dtype=torch.float32, device=gates.device)
    padded, rows, warps = recurrence_tile(hidden)
    programs = triton.cdiv(batch, rows)
    sums_h = dh0.new_empty(programs, hidden) if need_reset else None
    dy, dh_n, _ = d_outputs
    gru_backward_kernel[(programs,)](
        gates, saved, h_in, w_hh, mask, dy, dh_n, amax_bits, d_gates, dh0, sums_h, steps, batch, h_in.stride(0),
        H=hidden, HP=padded, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    return d_gates, dh0, None, None if sums_h is None else sums_h.sum(0), None
