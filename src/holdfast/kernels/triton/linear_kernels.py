"""The linear recurrence in Triton, float32: one pass over memory forward, one backward, all steps in one launch.

A lane owns a channel of a batch row and carries its state in registers. Steps are taken in fours: the loads of four steps
are issued before the first of them is computed, since the time is that of memory. `reference/linear.py` specifies what is
computed; C is the number of channels, W the floats in a row of the state (2 C for complex numbers, C otherwise).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.linear_operator import Gradients, Kept, Needed
from holdfast.kernels.operands import Resets

FORMS = {"real": 0, "complex": 1, "gated": 2}  # FORM in the kernels


@triton.jit
def load_reset(resets, at, ok):
    """Whether the rows start over at this step; all False without resets."""
    if resets is None:
        flagged = ok & False
    else:
        flagged = tl.load(resets + at, mask=ok, other=0) != 0
    return flagged


@triton.jit
def load_pair(pointer, at, ok, C: tl.constexpr, SECOND: tl.constexpr):
    """The numbers at `at` and, with SECOND, C further: imaginary parts, or candidates after their gates."""
    first = tl.load(pointer + at, mask=ok, other=0.0)
    second = first
    if SECOND:
        second = tl.load(pointer + at + C, mask=ok, other=0.0)
    return first, second


@triton.jit
def store_pair(pointer, at, ok, first, second, C: tl.constexpr, SECOND: tl.constexpr):
    tl.store(pointer + at, first, mask=ok)
    if SECOND:
        tl.store(pointer + at + C, second, mask=ok)


@triton.jit
def advance(re, im, reset, fill_re, fill_im, a_re, a_im, b_1, b_2, FORM: tl.constexpr):
    """One step: the new state from the one before, selected by the reset."""
    re = tl.where(reset, fill_re, re)
    im = tl.where(reset, fill_im, im)
    if FORM == 2:
        new_re = re + tl.sigmoid(b_1) * (b_2 - re)
        new_im = im
    elif FORM == 1:
        new_re = a_re * re - a_im * im + b_1
        new_im = a_re * im + a_im * re + b_2
    else:
        new_re = a_re * re + b_1
        new_im = im
    return new_re, new_im


@triton.jit(do_not_specialize=["steps", "batch"])
def linear_forward_kernel(
    a, b, h0, resets, fill, h, h_n, steps, batch,
    C: tl.constexpr, FORM: tl.constexpr, PER_CHANNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = 2 * C if FORM == 1 else C
    V: tl.constexpr = C if FORM == 0 else 2 * C  # floats in a row of b
    PAIR: tl.constexpr = FORM == 1
    HAS_A: tl.constexpr = FORM != 2
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, channel = lane // C, lane % C
    ok = row < batch
    at, b_at = row * W + channel, row * V + channel
    step, b_step = batch.to(tl.int64) * W, batch.to(tl.int64) * V

    re, im = load_pair(h0, at, ok, C, PAIR)
    fill_re = tl.zeros([BLOCK], tl.float32)
    fill_im = fill_re
    if fill is not None:
        fill_re, fill_im = load_pair(fill, channel, ok, C, PAIR)
    a0_re, a0_im = re, im
    if HAS_A and PER_CHANNEL:
        a0_re, a0_im = load_pair(a, channel, ok, C, PAIR)
    a1_re, a1_im, a2_re, a2_im, a3_re, a3_im = a0_re, a0_im, a0_re, a0_im, a0_re, a0_im
    for t in range(0, steps, 4):
        left = tl.zeros([BLOCK], tl.int32) + (steps - t)  # steps not yet taken, in every lane
        ok1, ok2, ok3 = ok & (left > 1), ok & (left > 2), ok & (left > 3)
        x0, y0 = load_pair(b, b_at, ok, C, FORM != 0)
        x1, y1 = load_pair(b, b_at + b_step, ok1, C, FORM != 0)
        x2, y2 = load_pair(b, b_at + 2 * b_step, ok2, C, FORM != 0)
        x3, y3 = load_pair(b, b_at + 3 * b_step, ok3, C, FORM != 0)
        if HAS_A and not PER_CHANNEL:
            a0_re, a0_im = load_pair(a, at, ok, C, PAIR)
            a1_re, a1_im = load_pair(a, at + step, ok1, C, PAIR)
            a2_re, a2_im = load_pair(a, at + 2 * step, ok2, C, PAIR)
            a3_re, a3_im = load_pair(a, at + 3 * step, ok3, C, PAIR)
        r0 = load_reset(resets, row, ok)
        r1 = load_reset(resets, row + batch, ok1)
        r2 = load_reset(resets, row + 2 * batch, ok2)
        r3 = load_reset(resets, row + 3 * batch, ok3)
        re, im = advance(re, im, r0, fill_re, fill_im, a0_re, a0_im, x0, y0, FORM)
        store_pair(h, at, ok, re, im, C, PAIR)
        next_re, next_im = advance(re, im, r1, fill_re, fill_im, a1_re, a1_im, x1, y1, FORM)
        store_pair(h, at + step, ok1, next_re, next_im, C, PAIR)
        re, im = tl.where(ok1, next_re, re), tl.where(ok1, next_im, im)
        next_re, next_im = advance(re, im, r2, fill_re, fill_im, a2_re, a2_im, x2, y2, FORM)
        store_pair(h, at + 2 * step, ok2, next_re, next_im, C, PAIR)
        re, im = tl.where(ok2, next_re, re), tl.where(ok2, next_im, im)
        next_re, next_im = advance(re, im, r3, fill_re, fill_im, a3_re, a3_im, x3, y3, FORM)
        store_pair(h, at + 3 * step, ok3, next_re, next_im, C, PAIR)
        re, im = tl.where(ok3, next_re, re), tl.where(ok3, next_im, im)
        at += 4 * step
        b_at += 4 * b_step
        if resets is not None:
            resets += 4 * batch
    store_pair(h_n, row * W + channel, ok, re, im, C, PAIR)


@triton.jit
def retreat(
    ok, carry_re, carry_im, sums, reset, before_re, before_im, fill_re, fill_im, a_re, a_im, b_1, b_2, g_re, g_im,
    a_at, b_at, d_a, d_b, C: tl.constexpr, FORM: tl.constexpr, PER_CHANNEL: tl.constexpr, DETACH: tl.constexpr,
):  # fmt: skip
    """One step of the backward: stores the gradients of a and b, returns the carried gradient and the sums."""
    PAIR: tl.constexpr = FORM == 1
    a_sum_re, a_sum_im, fill_sum_re, fill_sum_im = sums
    g_re += carry_re
    g_im += carry_im
    if not DETACH:
        before_re = tl.where(reset, fill_re, before_re)
        before_im = tl.where(reset, fill_im, before_im)
    if FORM == 2:
        z = tl.sigmoid(b_1)
        replaced = g_re * z
        store_pair(d_b, b_at, ok, replaced * (1.0 - z) * (b_2 - before_re), replaced, C, True)
        new_re = g_re - replaced
        new_im = carry_im
    else:
        store_pair(d_b, b_at, ok, g_re, g_im, C, PAIR)
        if PAIR:
            new_re = a_re * g_re + a_im * g_im
            new_im = a_re * g_im - a_im * g_re
            d_re = g_re * before_re + g_im * before_im
            d_im = g_im * before_re - g_re * before_im
        else:
            new_re = a_re * g_re
            new_im = carry_im
            d_re = g_re * before_re
            d_im = d_re
        if PER_CHANNEL:
            a_sum_re += tl.where(ok, d_re, 0.0)
            a_sum_im += tl.where(ok, d_im, 0.0)
        elif d_a is not None:
            store_pair(d_a, a_at, ok, d_re, d_im, C, PAIR)
    fill_sum_re += tl.where(ok & reset, new_re, 0.0)
    fill_sum_im += tl.where(ok & reset, new_im, 0.0)
    carry_re = tl.where(ok, tl.where(reset, 0.0, new_re), carry_re)
    carry_im = tl.where(ok, tl.where(reset, 0.0, new_im), carry_im)
    return carry_re, carry_im, (a_sum_re, a_sum_im, fill_sum_re, fill_sum_im)


@triton.jit
def load_before(h, at, step, inside, first_re, first_im, is_first, C: tl.constexpr, PAIR: tl.constexpr):
    """The state before the step at `at`, without its reset: of the step before, or at the first step h0."""
    re, im = load_pair(h, at - step, inside, C, PAIR)
    return tl.where(is_first, first_re, re), tl.where(is_first, first_im, im)


@triton.jit(do_not_specialize=["steps", "batch"])
def linear_backward_kernel(
    a, b, h0, h, resets, fill, dh, dh_n, d_a, d_b, d_h0, d_fill, steps, batch,
    C: tl.constexpr, FORM: tl.constexpr, PER_CHANNEL: tl.constexpr, DETACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps from the last to the first. With PER_CHANNEL, d_a and always d_fill are sums over time, [B, W]."""
    W: tl.constexpr = 2 * C if FORM == 1 else C
    V: tl.constexpr = C if FORM == 0 else 2 * C
    PAIR: tl.constexpr = FORM == 1
    HAS_A: tl.constexpr = FORM != 2
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, channel = lane // C, lane % C
    ok = row < batch
    step, b_step = batch.to(tl.int64) * W, batch.to(tl.int64) * V
    last = tl.full((), 1, tl.int64) * (steps - 1)
    state_at = row * W + channel
    at, b_at = last * step + state_at, last * b_step + row * V + channel
    r_at = last * batch + row

    zeros = tl.zeros([BLOCK], tl.float32)
    carry_re, carry_im = zeros, zeros
    if dh_n is not None:
        carry_re, carry_im = load_pair(dh_n, state_at, ok, C, PAIR)
    first_re, first_im = load_pair(h0, state_at, ok, C, PAIR)
    fill_re, fill_im = zeros, zeros
    if fill is not None:
        fill_re, fill_im = load_pair(fill, channel, ok, C, PAIR)
    a0_re, a0_im = zeros, zeros
    if HAS_A and PER_CHANNEL:
        a0_re, a0_im = load_pair(a, channel, ok, C, PAIR)
    a1_re, a1_im, a2_re, a2_im, a3_re, a3_im = a0_re, a0_im, a0_re, a0_im, a0_re, a0_im
    x0, y0, x1, y1, x2, y2, x3, y3 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    g0, i0, g1, i1, g2, i2, g3, i3 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    sums = (zeros, zeros, zeros, zeros)
    for taken in range(0, steps, 4):
        left = tl.zeros([BLOCK], tl.int32) + (steps - taken)  # steps not yet taken, in every lane
        ok1, ok2, ok3 = ok & (left > 1), ok & (left > 2), ok & (left > 3)
        h0_re, h0_im = load_before(h, at, step, ok1, first_re, first_im, left == 1, C, PAIR)
        h1_re, h1_im = load_before(h, at - step, step, ok2, first_re, first_im, left == 2, C, PAIR)
        h2_re, h2_im = load_before(h, at - 2 * step, step, ok3, first_re, first_im, left == 3, C, PAIR)
        h3_re, h3_im = load_before(h, at - 3 * step, step, ok & (left > 4), first_re, first_im, left == 4, C, PAIR)
        if dh is not None:
            g0, i0 = load_pair(dh, at, ok, C, PAIR)
            g1, i1 = load_pair(dh, at - step, ok1, C, PAIR)
            g2, i2 = load_pair(dh, at - 2 * step, ok2, C, PAIR)
            g3, i3 = load_pair(dh, at - 3 * step, ok3, C, PAIR)
        if HAS_A and not PER_CHANNEL:
            a0_re, a0_im = load_pair(a, at, ok, C, PAIR)
            a1_re, a1_im = load_pair(a, at - step, ok1, C, PAIR)
            a2_re, a2_im = load_pair(a, at - 2 * step, ok2, C, PAIR)
            a3_re, a3_im = load_pair(a, at - 3 * step, ok3, C, PAIR)
        if not HAS_A:
            x0, y0 = load_pair(b, b_at, ok, C, True)
            x1, y1 = load_pair(b, b_at - b_step, ok1, C, True)
            x2, y2 = load_pair(b, b_at - 2 * b_step, ok2, C, True)
            x3, y3 = load_pair(b, b_at - 3 * b_step, ok3, C, True)
        r0 = load_reset(resets, r_at, ok)
        r1 = load_reset(resets, r_at - batch, ok1)
        r2 = load_reset(resets, r_at - 2 * batch, ok2)
        r3 = load_reset(resets, r_at - 3 * batch, ok3)
        carry_re, carry_im, sums = retreat(
            ok, carry_re, carry_im, sums, r0, h0_re, h0_im, fill_re, fill_im, a0_re, a0_im, x0, y0, g0, i0,
            at, b_at, d_a, d_b, C, FORM, PER_CHANNEL, DETACH,
        )  # fmt: skip
        carry_re, carry_im, sums = retreat(
            ok1, carry_re, carry_im, sums, r1, h1_re, h1_im, fill_re, fill_im, a1_re, a1_im, x1, y1, g1, i1,
            at - step, b_at - b_step, d_a, d_b, C, FORM, PER_CHANNEL, DETACH,
        )  # fmt: skip
        carry_re, carry_im, sums = retreat(
            ok2, carry_re, carry_im, sums, r2, h2_re, h2_im, fill_re, fill_im, a2_re, a2_im, x2, y2, g2, i2,
            at - 2 * step, b_at - 2 * b_step, d_a, d_b, C, FORM, PER_CHANNEL, DETACH,
        )  # fmt: skip
        carry_re, carry_im, sums = retreat(
            ok3, carry_re, carry_im, sums, r3, h3_re, h3_im, fill_re, fill_im, a3_re, a3_im, x3, y3, g3, i3,
            at - 3 * step, b_at - 3 * b_step, d_a, d_b, C, FORM, PER_CHANNEL, DETACH,
        )  # fmt: skip
        at -= 4 * step
        b_at -= 4 * b_step
        r_at -= 4 * batch
    if d_h0 is not None:
        store_pair(d_h0, state_at, ok, carry_re, carry_im, C, PAIR)
    if PER_CHANNEL and d_a is not None:
        store_pair(d_a, state_at, ok, sums[0], sums[1], C, PAIR)
    if d_fill is not None:
        store_pair(d_fill, state_at, ok, sums[2], sums[3], C, PAIR)


def block_of(lanes: int) -> tuple[int, int]:
    """(lanes, warps) per program: a static choice. Few lanes are spread over many programs, many load two at a time."""
    return (256, 4) if lanes >= 1 << 18 else (128, 4) if lanes >= 1 << 15 else (32, 1)


def forward(a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str) -> tuple[Tensor, Tensor]:
    """`reference.linear.sequence` without autograd."""
    (T, B, _), W = b.shape, h0.shape[1]
    C = W // 2 if form == "complex" else W
    h, h_n = b.new_empty(T, B, W), torch.empty_like(h0, memory_format=torch.contiguous_format)
    mask = None if resets.detach else _contiguous(resets.mask)
    block, warps = block_of(B * C)
    linear_forward_kernel[(triton.cdiv(B * C, block),)](
        _contiguous(a), b.contiguous(), h0.contiguous(), mask, _contiguous(resets.h), h, h_n, T, B,
        C=C, FORM=FORMS[form], PER_CHANNEL=a is not None and a.dim() == 1, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return h, h_n


def backward(dh: Tensor | None, dh_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    a, b, h0, h, resets, form = kept
    T, B, W = h.shape
    C = W // 2 if form == "complex" else W
    per_channel = a is not None and a.dim() == 1
    d_b = b.new_empty(b.shape)
    d_a = None if a is None or not needed.a else h0.new_empty(B, W) if per_channel else a.new_empty(a.shape)
    d_h0, d_fill = (h0.new_empty(B, W) if need else None for need in (needed.h0, needed.fill))
    block, warps = block_of(B * C)
    linear_backward_kernel[(triton.cdiv(B * C, block),)](
        _contiguous(a), b.contiguous(), h0.contiguous(), h, _contiguous(resets.mask), _contiguous(resets.h),
        _contiguous(dh), _contiguous(dh_n), d_a, d_b, d_h0, d_fill, T, B,
        C=C, FORM=FORMS[form], PER_CHANNEL=per_channel, DETACH=resets.detach, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if per_channel and d_a is not None:
        d_a = d_a.sum(0)
    return Gradients(d_a, d_b, d_h0, None if d_fill is None else d_fill.sum(0))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
