"""One step of an LSTM or GRU layer without gradients, one launch in Triton, for rollouts.

It rounds where the sequence kernels round: inputs, h and weights are fp16, sums fp32, the input's part of a gate goes through
fp16, the carried state is fp32. So a rollout replays to within the last bits of those sums. `reference/` says what is computed.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.operands import Resets, Weights
from holdfast.kernels.triton.elements import tanh
from holdfast.kernels.triton.tiles import padded

LARGEST_WIDTH = 256  # of inputs and of units: a tile of rows stays on chip


@triton.jit
def half(x):
    """fp16, saturated."""
    return tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x)).to(tl.float16)


@triton.jit
def product(x, w, first, unit, K: tl.constexpr, KP: tl.constexpr, H: tl.constexpr):
    """x [BLOCK, KP] times the rows `first + unit` of w [.., K]."""
    k, u = tl.arange(0, KP)[:, None], unit[None, :]
    return tl.dot(x, tl.load(w + (first + u) * K + k, mask=(k < K) & (u < H), other=0.0))


@triton.jit
def bias(b, first, unit, H: tl.constexpr):
    value = tl.zeros(unit.shape, tl.float32)
    if b is not None:
        value += tl.load(b + first + unit, mask=unit < H, other=0.0)
    return value[None, :]


@triton.jit
def from_input(x, w_ih, b_ih, first, unit, I: tl.constexpr, IP: tl.constexpr, H: tl.constexpr):
    return product(x, w_ih, first, unit, I, IP, H).to(tl.float16).to(tl.float32) + bias(b_ih, first, unit, H)


@triton.jit
def from_state(h, w_hh, b_hh, first, unit, H: tl.constexpr, HP: tl.constexpr):
    return product(h, w_hh, first, unit, H, HP, H) + bias(b_hh, first, unit, H)


@triton.jit
def load_state(state, fill, reset, row, ok, unit, H: tl.constexpr):
    """[BLOCK, units] fp32, rows that start over from `fill` (None: zeros)."""
    inside = ok[:, None] & (unit[None, :] < H)
    value = tl.load(state + row.to(tl.int64)[:, None] * H + unit[None, :], mask=inside, other=0.0)
    start = tl.zeros(unit.shape, tl.float32)
    if fill is not None:
        start += tl.load(fill + unit, mask=unit < H, other=0.0)
    return tl.where(reset[:, None], start[None, :], value)


@triton.jit(do_not_specialize=["batch"])
def step_kernel(
    x, h, c, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, h_n, c_n, batch,
    I: tl.constexpr, IP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c None: a GRU."""
    row, unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    ok = row < batch
    reset = ok & False
    if resets is not None:
        reset = tl.load(resets + row, mask=ok, other=0) != 0
    i, k = tl.arange(0, IP)[None, :], tl.arange(0, HP)
    x_half = half(tl.load(x + row.to(tl.int64)[:, None] * I + i, mask=ok[:, None] & (i < I), other=0.0))
    h_half = load_state(h, fill_h, reset, row, ok, k, H).to(tl.float16)
    v0 = from_input(x_half, w_ih, b_ih, 0, unit, I, IP, H) + from_state(h_half, w_hh, b_hh, 0, unit, H, HP)
    v1 = from_input(x_half, w_ih, b_ih, H, unit, I, IP, H) + from_state(h_half, w_hh, b_hh, H, unit, H, HP)
    at = row.to(tl.int64)[:, None] * H + unit[None, :]
    inside = ok[:, None] & (unit[None, :] < H)
    if c is not None:
        v2 = from_input(x_half, w_ih, b_ih, 2 * H, unit, I, IP, H) + from_state(h_half, w_hh, b_hh, 2 * H, unit, H, HP)
        v3 = from_input(x_half, w_ih, b_ih, 3 * H, unit, I, IP, H) + from_state(h_half, w_hh, b_hh, 3 * H, unit, H, HP)
        cell = load_state(c, fill_c, reset, row, ok, unit, H)
        cell = tl.sigmoid(v1) * cell + tl.sigmoid(v0) * tanh(v2)
        tl.store(c_n + at, cell, mask=inside)
        tl.store(h_n + at, tl.sigmoid(v3) * tanh(cell), mask=inside)
    else:
        given = from_state(h_half, w_hh, b_hh, 2 * H, unit, H, HP)
        new = tanh(from_input(x_half, w_ih, b_ih, 2 * H, unit, I, IP, H) + tl.sigmoid(v0) * given)
        before = load_state(h, fill_h, reset, row, ok, unit, H)
        tl.store(h_n + at, new + tl.sigmoid(v1) * (before - new), mask=inside)


def supports(inputs: int, hidden: int) -> bool:
    """Whether the kernel takes a layer of this size."""
    return max(inputs, hidden) <= LARGEST_WIDTH


def step(
    x: Tensor, h: Tensor, c: Tensor | None, resets: Resets, weights: Weights, *, block: int = 128, units: int = 64,
    warps: int = 8,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The new h (which is the output too) and c. x [B, I], h and c [B, H]: float32. The two matrices of `weights` are fp16."""
    batch, inputs = x.shape
    hidden = weights.w_hh.shape[1]
    h_n, c_n = torch.empty_like(h), None if c is None else torch.empty_like(c)
    mask, fill_h, fill_c, detach = resets
    if detach:  # the state goes on
        mask = None
    units = min(units, padded(hidden))
    step_kernel[(triton.cdiv(batch, block), triton.cdiv(hidden, units))](
        x, h, c, mask, fill_h, fill_c, *weights, h_n, c_n, batch, I=inputs, IP=padded(inputs), H=hidden, HP=padded(hidden),
        UNITS=units, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return h_n, c_n
