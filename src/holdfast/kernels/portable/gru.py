"""The GRU in plain torch: forward and hand-written backward."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.gated_operator import Kept, Outputs, make_operator
from holdfast.kernels.operands import Gradients, Needed, Resets, Weights
from holdfast.kernels.portable import time_loop


def _forward(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, keep: bool) -> Outputs:
    """Kept for the backward: activated gates r, z, n [T, B, 3H], the hidden part of n [T, B, H], and h in the state's
    dtype [T, B, H], empty if that is y."""
    (mask, reset_h, _, detach_at_reset), (w_ih, w_hh, b_ih, b_hh) = resets, weights
    T, B, _ = x.shape
    H = w_hh.shape[1]
    S = h0.dtype
    mixed = x.dtype != S
    bias = b_ih
    if b_ih is not None and b_hh is not None:  # the hidden bias of n sits inside the product with r
        bias = torch.cat([b_ih[: 2 * H] + b_hh[: 2 * H], b_ih[2 * H :]])
    projected = time_loop.project(x, w_ih, bias)
    gates = projected.to(S) if mixed else projected
    hidden_n = h0.new_empty(T, B, H)
    y = x.new_empty(T, B, H)
    h_full = h0.new_empty(T, B, H) if mixed else h0.new_empty(0)
    w_rz, w_n = w_hh[: 2 * H].t(), w_hh[2 * H :].t()
    bias_n = x.new_zeros(H) if b_hh is None else b_hh[2 * H :]

    any_reset = time_loop.steps_with_resets(None if detach_at_reset else mask, T)
    masks = time_loop.masks_by_step(mask)
    pre_rz, act_rz = projected[..., : 2 * H].unbind(0), gates[..., : 2 * H].unbind(0)
    r_, z_, n_ = (gates[..., k * H : (k + 1) * H].unbind(0) for k in range(3))
    hn_, y_, h_ = hidden_n.unbind(0), y.unbind(0), (h_full if mixed else y).unbind(0)
    h = h0
    for t in range(T):
        if any_reset[t]:
            h = time_loop.reset(h, masks[t], reset_h)
        h_in = h.to(x.dtype)
        pre_rz[t].addmm_(h_in, w_rz)
        if mixed:
            act_rz[t].copy_(pre_rz[t])
            hn_[t].copy_(torch.addmm(bias_n, h_in, w_n, out=x.new_empty(B, H)))
        else:
            torch.addmm(bias_n, h_in, w_n, out=hn_[t])
        act_rz[t].sigmoid_()
        n_[t].addcmul_(r_[t], hn_[t]).tanh_()
        h = torch.lerp(n_[t], h, z_[t], out=h_[t])  # (1 - z) n + z h
        if mixed:
            y_[t].copy_(h)
    return Outputs(y, h.clone(), None, None, (gates, hidden_n, h_full) if keep else ())


def _new_outputs(x: Tensor, h0: Tensor, w_hh: Tensor, is_lstm: bool, keep: bool) -> Outputs:
    (T, B, _), H = x.shape, w_hh.shape[1]
    h_full = h0.new_empty(T, B, H) if h0.dtype != x.dtype else h0.new_empty(0)
    kept = (h0.new_empty(T, B, 3 * H), h0.new_empty(T, B, H), h_full) if keep else ()
    return Outputs(x.new_empty(T, B, H), h0.new_empty(B, H), None, None, kept)


def _backward(dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    x, h0, _, (mask, reset_h, _, detach_at_reset), (w_ih, w_hh, *_), y, _, (gates, hidden_n, h_full) = kept
    need_w = any(needed[5:])
    T, B, H = y.shape
    D, S = x.dtype, h0.dtype
    dgh = x.new_empty(T, B, 3 * H)  # gradients of the hidden-side pre-activations: r, z, n
    dn_in = x.new_empty(T, B, H)  # of n on the input side; r and z are the same on both
    dh = torch.zeros_like(h0) if dh_n is None else dh_n.clone()
    d_reset_h = h0.new_zeros(H)
    any_reset = time_loop.steps_with_resets(mask, T)
    masks = time_loop.masks_by_step(mask)
    h_before = time_loop.states_before(h0, y if D == S else h_full, mask, reset_h, detach_at_reset)
    dys = None if dy is None else dy.to(S).unbind(0)
    tanh_backward, sigmoid_backward = torch.ops.aten.tanh_backward, torch.ops.aten.sigmoid_backward

    for begin, end in time_loop.chunks_from_the_end(T, B, H):
        span = slice(begin, end)
        r, z, n = gates[span].split(H, dim=-1)
        dhs = gates.new_empty(end - begin, B, H)
        # For now the factors of dh for each gate; the loop multiplies them into gate gradients.
        k_n = tanh_backward(1 - z, n)
        d = dgh[span] if D == S else gates.new_empty(end - begin, B, 3 * H)
        torch.mul(sigmoid_backward(hidden_n[span], r), k_n, out=d[..., :H])
        d[..., H : 2 * H].copy_(sigmoid_backward(h_before[span] - n, z))
        torch.mul(k_n, r, out=d[..., 2 * H :])
        d_all, d_rzn = d.unbind(0), d.unflatten(-1, (3, H)).unbind(0)
        z_t, dh_t = z.unbind(0), dhs.unbind(0)
        for t in range(end - 1, begin - 1, -1):
            k = t - begin
            if dys is None:
                dh_t[k].copy_(dh)
            else:
                torch.add(dh, dys[t], out=dh_t[k])
            d_rzn[k].mul_(dh_t[k].unsqueeze(1))
            torch.mul(dh_t[k], z_t[k], out=dh)
            if D == S:
                dh.addmm_(d_all[k], w_hh)
            else:
                dgh[t].copy_(d_all[k])
                dh += time_loop.mm(dgh[t], w_hh)
            if any_reset[t]:
                if reset_h is not None and not detach_at_reset:
                    d_reset_h += dh.where(masks[t], 0.0).sum(0)
                dh.masked_fill_(masks[t], 0.0)
        torch.mul(k_n, dhs, out=dn_in[span]) if D == S else dn_in[span].copy_(k_n * dhs)

    dgx = torch.cat([dgh[..., : 2 * H], dn_in], dim=-1).view(T * B, 3 * H)
    flat = dgh.view(T * B, 3 * H)
    dx, dw_ih, dw_hh = time_loop.input_and_weight_grads(dgx, flat, x, h_before.to(D), w_ih, needed.x, need_w)
    biases = tuple(part.sum(0, dtype=S).to(D) for part in (dgx, flat)) if need_w else (None, None)
    return Gradients(dx, dh, None, d_reset_h, None, dw_ih, dw_hh, *biases)


_layer = make_operator("gru_portable", _forward, _backward, _new_outputs)


def sequence(x: Tensor, h0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor]:
    """As `reference.gru.sequence`."""
    return _layer(x, h0, None, resets, weights)[:2]
