"""The LSTM in plain torch: forward and hand-written backward.

Inside, the gates are in the order g, i, f, o: the sigmoids i, f, o are adjacent for the forward, and g, i, f, which all
multiply the gradient of c, are adjacent for the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.gated_operator import Kept, Outputs, make_operator
from holdfast.kernels.operands import Gradients, Needed, Resets, Weights
from holdfast.kernels.portable import time_loop


def _to_gifo(w: Tensor) -> Tensor:
    i, f, g, o = w.chunk(4)
    return torch.cat([g, i, f, o])


def _from_gifo(w: Tensor) -> Tensor:
    g, i, f, o = w.chunk(4)
    return torch.cat([i, f, g, o])


def _forward(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, keep: bool) -> Outputs:
    """Kept for the backward: activated gates [T, B, 4H], c and tanh(c) [T, B, H]."""
    assert c0 is not None
    (mask, reset_h, reset_c, detach_at_reset), (w_ih, w_hh, b_ih, b_hh) = resets, weights
    bias = None if b_ih is None or b_hh is None else b_ih + b_hh
    T, B, _ = x.shape
    H = w_hh.shape[1]
    S = c0.dtype
    projected = time_loop.project(x, _to_gifo(w_ih), None if bias is None else _to_gifo(bias))
    w = _to_gifo(w_hh).t()
    mixed = x.dtype != S
    gates = projected.to(S) if mixed else projected
    y = x.new_empty(T, B, H)
    cs = c0.new_empty(T, B, H)
    tanh_c = torch.empty_like(cs)
    h_full = c0.new_empty(B, H) if mixed else y  # h in the state's dtype; the same tensor when dtypes agree

    any_reset = time_loop.steps_with_resets(None if detach_at_reset else mask, T)
    masks = time_loop.masks_by_step(mask)
    pre, act = projected.unbind(0), gates.unbind(0)
    g_, ifo = gates[..., :H].unbind(0), gates[..., H:].unbind(0)
    i_, f_, o_ = (gates[..., k * H : (k + 1) * H].unbind(0) for k in (1, 2, 3))
    y_, c_, tc_ = y.unbind(0), cs.unbind(0), tanh_c.unbind(0)
    h, c = h0.to(x.dtype), c0
    for t in range(T):
        if any_reset[t]:
            h, c = time_loop.reset(h, masks[t], reset_h), time_loop.reset(c, masks[t], reset_c)
        pre[t].addmm_(h, w)
        if mixed:
            act[t].copy_(pre[t])
        g_[t].tanh_()
        ifo[t].sigmoid_()
        torch.mul(f_[t], c, out=c_[t])
        c = c_[t].addcmul_(i_[t], g_[t])
        torch.tanh(c, out=tc_[t])
        if mixed:
            y_[t].copy_(torch.mul(o_[t], tc_[t], out=h_full))
        else:
            torch.mul(o_[t], tc_[t], out=y_[t])
        h = y_[t]
    kept = (gates, tanh_c) if keep else ()
    if T == 0:
        return Outputs(y, h0.clone(), c0.clone(), cs, kept)
    return Outputs(y, h_full if mixed else y[-1].clone(), cs[-1].clone(), cs if keep else None, kept)


def _new_outputs(x: Tensor, h0: Tensor, w_hh: Tensor, is_lstm: bool, keep: bool) -> Outputs:
    (T, B, _), H = x.shape, w_hh.shape[1]
    y, cells = x.new_empty(T, B, H), h0.new_empty(T, B, H) if keep else None
    kept = (h0.new_empty(T, B, 4 * H), h0.new_empty(T, B, H)) if keep else ()
    return Outputs(y, h0.new_empty(B, H), h0.new_empty(B, H), cells, kept)


def _backward(dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    x, h0, c0, (mask, reset_h, reset_c, detach_at_reset), (w_ih, w_hh, *_), y, cs, (gates, tanh_c, *_) = kept
    assert c0 is not None and cs is not None
    need_w = any(needed[5:])
    T, B, H = y.shape
    D, S = x.dtype, c0.dtype
    w = _to_gifo(w_hh)
    dgates = torch.empty_like(gates) if D == S else gates.new_empty(gates.shape, dtype=D)
    dh = torch.zeros_like(c0) if dh_n is None else dh_n.to(S, copy=True)
    dc = torch.zeros_like(c0) if dc_n is None else dc_n.clone()
    d_reset_h, d_reset_c = c0.new_zeros(H), c0.new_zeros(H)
    any_reset = time_loop.steps_with_resets(mask, T)
    masks = time_loop.masks_by_step(mask)
    c_before = time_loop.states_before(c0, cs, mask, reset_c, detach_at_reset)
    dys = None if dy is None else dy.to(S).unbind(0)
    tanh_backward, sigmoid_backward = torch.ops.aten.tanh_backward, torch.ops.aten.sigmoid_backward

    for begin, end in time_loop.chunks_from_the_end(T, B, H):
        span = slice(begin, end)
        g, i, f, o = gates[span].split(H, dim=-1)
        tc = tanh_c[span]
        d = dgates[span] if D == S else gates.new_empty(gates[span].shape)
        # For now the factors of dc (for g, i, f) or dh (for o); the loop multiplies them into gate gradients.
        d[..., :H].copy_(tanh_backward(i, g))
        d[..., H : 2 * H].copy_(sigmoid_backward(g, i))
        d[..., 2 * H : 3 * H].copy_(sigmoid_backward(c_before[span], f))
        d[..., 3 * H :].copy_(sigmoid_backward(tc, o))
        dh_to_dc = tanh_backward(o, tc)
        d_all = d.unbind(0)
        d_gif = d[..., : 3 * H].unflatten(-1, (3, H)).unbind(0)
        d_o, f_t, k_t = d[..., 3 * H :].unbind(0), f.unbind(0), dh_to_dc.unbind(0)
        for t in range(end - 1, begin - 1, -1):
            k = t - begin
            if dys is not None:
                dh += dys[t]
            dc.addcmul_(dh, k_t[k])
            d_gif[k].mul_(dc.unsqueeze(1))
            d_o[k].mul_(dh)
            dc.mul_(f_t[k])
            if D == S:
                torch.mm(d_all[k], w, out=dh)
            else:
                dgates[t].copy_(d_all[k])
                dh.copy_(time_loop.mm(dgates[t], w))
            if any_reset[t]:
                if reset_h is not None and not detach_at_reset:
                    d_reset_h += dh.where(masks[t], 0.0).sum(0)
                    d_reset_c += dc.where(masks[t], 0.0).sum(0)
                dh.masked_fill_(masks[t], 0.0)
                dc.masked_fill_(masks[t], 0.0)

    flat = dgates.view(T * B, 4 * H)
    h_before = time_loop.states_before(h0, y, mask, reset_h, detach_at_reset) if need_w else y
    dx, dw_ih, dw_hh = time_loop.input_and_weight_grads(flat, flat, x, h_before, _to_gifo(w_ih), needed.x, need_w)
    starts = (dx, dh, dc, d_reset_h, d_reset_c)
    if dw_ih is None or dw_hh is None:
        return Gradients(*starts, None, None, None, None)
    dbias = _from_gifo(flat.sum(0, dtype=S).to(D))
    return Gradients(*starts, _from_gifo(dw_ih), _from_gifo(dw_hh), dbias, dbias.clone())


_layer = make_operator("lstm_portable", _forward, _backward, _new_outputs)


def sequence(x: Tensor, h0: Tensor, c0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.lstm.sequence`."""
    return _layer(x, h0, c0, resets, weights)[:3]


def sequence_with_cells(
    x: Tensor, h0: Tensor, c0: Tensor, resets: Resets, weights: Weights
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `sequence`, and the cell state after every step, [T, B, H], without gradients."""
    return _layer(x, h0, c0, resets, weights, keep=True)
