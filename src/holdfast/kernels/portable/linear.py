"""The linear recurrence in plain torch, for any device and float dtype: a loop over time, and its backward by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.linear_operator import Gradients, Kept, Needed, make_operator
from holdfast.kernels.operands import Resets
from holdfast.kernels.portable.time_loop import masks_by_step, reset, states_before, steps_with_resets


def _forward(a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str) -> tuple[Tensor, Tensor]:
    if a is None:
        gate, candidate = b.chunk(2, dim=-1)
        z = torch.sigmoid(gate)
        a, b = 1 - z, z * candidate
    T, mask = b.shape[0], None if resets.detach else resets.mask
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    any_reset, masks = steps_with_resets(mask, T), masks_by_step(mask)
    a_, b_, h_ = _by_step(a, T), b.unbind(0), h.unbind(0)
    before = h0
    for t in range(T):
        if any_reset[t]:
            before = reset(before, masks[t], resets.h)
        if form == "complex":
            _multiply_add(h_[t], a_[t], before, b_[t])
        else:
            torch.addcmul(b_[t], a_[t], before, out=h_[t])
        before = h_[t]
    return h, before.clone()


def _by_step(a: Tensor, T: int) -> tuple[Tensor, ...]:
    return a.unbind(0) if a.dim() == 3 else (a,) * T


def _multiply_add(out: Tensor, a: Tensor, h: Tensor, b: Tensor) -> None:
    """out = a h + b of complex numbers in halves."""
    (a_re, a_im), (h_re, h_im) = a.chunk(2, -1), h.chunk(2, -1)
    out_re, out_im = out.chunk(2, -1)
    torch.addcmul(b, torch.cat([a_re, a_re], -1), h, out=out)
    out_re.addcmul_(a_im, h_im, value=-1)
    out_im.addcmul_(a_im, h_re)


def _conjugate(a: Tensor) -> Tensor:
    re, im = a.chunk(2, -1)
    return torch.cat([re, -im], -1)


def _backward(dh: Tensor | None, dh_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    a, _, h0, h, resets, form = kept
    if a is None:
        return _gated_backward(dh, dh_n, kept, needed)
    T = h.shape[0]
    is_complex = form == "complex"
    db = torch.zeros_like(h) if dh is None else dh.clone(memory_format=torch.contiguous_format)
    carry = torch.zeros_like(h0) if dh_n is None else dh_n.clone()
    zeros = torch.zeros_like(h0)
    d_fill = h0.new_zeros(h0.shape[1:]) if needed.fill else None
    any_reset, masks = steps_with_resets(resets.mask, T), masks_by_step(resets.mask)
    a_, db_ = _by_step(_conjugate(a) if is_complex else a, T), db.unbind(0)
    for t in reversed(range(T)):
        db_[t].add_(carry)
        if is_complex:
            carry = torch.empty_like(h0)
            _multiply_add(carry, a_[t], db_[t], zeros)
        else:
            carry = a_[t] * db_[t]
        if any_reset[t]:
            if d_fill is not None:
                d_fill += torch.where(masks[t], carry, 0.0).sum(0)
            carry = carry.masked_fill(masks[t], 0.0)
    da = None
    if needed.a:
        before = states_before(h0, h, resets.mask, resets.h, resets.detach)
        da = torch.empty_like(h)
        if is_complex:
            _multiply_add(da, _conjugate(before), db, torch.zeros_like(h))
        else:
            torch.mul(db, before, out=da)
        da = da.sum((0, 1)) if a.dim() == 1 else da
    return Gradients(da, db, carry if needed.h0 else None, d_fill)


def _gated_backward(dh: Tensor | None, dh_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    gate, candidate = kept.b.chunk(2, dim=-1)
    z = torch.sigmoid(gate)
    real = kept._replace(a=1 - z, b=z * candidate, form="real")
    da, db, dh0, d_fill = _backward(dh, dh_n, real, needed._replace(a=True))
    assert da is not None
    d_gate = (db * candidate - da) * z * (1 - z)
    return Gradients(None, torch.cat([d_gate, db * z], -1), dh0, d_fill)


sequence = make_operator("linear_portable", _forward, _backward)
