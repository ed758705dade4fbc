"""LSTM and GRU over a whole sequence in plain torch, for any device and float dtype: no compiler needed.

The input projection is one product for all T; the loop over time holds only what is truly recurrent and writes into
preallocated tensors; the backward is written by hand, so that everything that does not depend on the recurrence is
done for many steps at once and each weight gradient is one product. `reference.py` says what is computed.

Inside, LSTM gates lie in the order g, i, f, o: the sigmoids i, f, o are adjacent for the forward, and g, i, f, which
all multiply the gradient of c, are adjacent for the backward.
"""

from typing import Optional

import torch
from torch import Tensor
from torch.library import custom_op

# Elements of [steps, B, H] handled at once in the backward: about what stays in a core's L2 cache.
_CHUNK = 32768


def _reset_steps(resets: Tensor | None, T: int) -> list[bool]:
    """Which steps hold any reset. On a GPU looking would stall the queue, so every step counts as one."""
    if resets is None:
        return [False] * T
    if resets.device.type != "cpu":
        return [True] * T
    return resets.any(dim=1).tolist()


def _previous(start: Tensor, sequence: Tensor, resets: Tensor | None, fill: Tensor | None, cut: bool) -> Tensor:
    """The state each step started from, [T, B, H]: shifted by one, then reset. Selects; a NaN does not survive."""
    shifted = torch.cat([start.to(sequence.dtype).unsqueeze(0), sequence[:-1]])
    if resets is None or cut:
        return shifted
    mask = resets.unsqueeze(-1)
    if fill is None:
        return shifted.masked_fill_(mask, 0.0)
    return torch.where(mask, fill.to(shifted.dtype), shifted)


def _enter(state: Tensor, mask: Tensor, fill: Tensor | None) -> Tensor:
    """The state after a reset of the masked rows; mask [B, 1]."""
    if fill is None:
        return state.masked_fill(mask, 0.0)
    return torch.where(mask, fill.to(state.dtype), state)


def _project(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x @ w.T + bias over all steps in one product. The out= form is one that autocast leaves alone."""
    T, B, _ = x.shape
    out = x.new_empty(T * B, w.shape[0])
    if bias is None:
        torch.mm(x.reshape(T * B, -1), w.t(), out=out)
    else:
        torch.addmm(bias, x.reshape(T * B, -1), w.t(), out=out)
    return out.view(T, B, -1)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _input_and_weight_grads(
    dgx: Tensor, dgh: Tensor, x: Tensor, h_prev: Tensor, w_ih: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dW_ih, dW_hh from the gate gradients on the input side and on the hidden side, [T*B, G] each."""
    dx = _mm(dgx, w_ih).view_as(x) if need_x else x.new_empty(0)
    if not need_w:
        return dx, x.new_empty(0), x.new_empty(0)  # an operator's outputs may not be one tensor
    N = dgx.shape[0]
    return dx, _mm(dgx.t(), x.reshape(N, -1)), _mm(dgh.t(), h_prev.view(N, -1))


# --- LSTM ----------------------------------------------------------------------------------------------------------


def _to_gifo(w: Tensor) -> Tensor:
    i, f, g, o = w.chunk(4)
    return torch.cat([g, i, f, o])


def _from_gifo(w: Tensor) -> Tensor:
    g, i, f, o = w.chunk(4)
    return torch.cat([i, f, g, o])


@custom_op("holdfast::lstm_portable", mutates_args=())
def _lstm_forward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    resets: Optional[Tensor],
    fill_h: Optional[Tensor],
    fill_c: Optional[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    bias: Optional[Tensor],
    cut: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, h_n, c_n and what the backward needs: activated gates [T, B, 4H], c and tanh(c) [T, B, H]."""
    T, B, _ = x.shape
    H = w_hh.shape[1]
    S = c0.dtype
    projected = _project(x, _to_gifo(w_ih), None if bias is None else _to_gifo(bias))
    w = _to_gifo(w_hh).t()
    mixed = x.dtype != S
    gates = projected.to(S) if mixed else projected
    y = x.new_empty(T, B, H)
    cs = c0.new_empty(T, B, H)
    tanh_c = torch.empty_like(cs)
    h_full = c0.new_empty(B, H) if mixed else y  # h in the state's dtype; the same tensor when dtypes agree

    any_reset = _reset_steps(None if cut else resets, T)
    masks = resets.unsqueeze(-1).unbind(0) if resets is not None else ()
    pre, act = projected.unbind(0), gates.unbind(0)
    g_, ifo = gates[..., :H].unbind(0), gates[..., H:].unbind(0)
    i_, f_, o_ = (gates[..., k * H : (k + 1) * H].unbind(0) for k in (1, 2, 3))
    y_, c_, tc_ = y.unbind(0), cs.unbind(0), tanh_c.unbind(0)
    h, c = h0.to(x.dtype), c0
    for t in range(T):
        if any_reset[t]:
            h, c = _enter(h, masks[t], fill_h), _enter(c, masks[t], fill_c)
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
    if T == 0:
        return y, h0.clone(), c0.clone(), gates, cs, tanh_c
    return y, (h_full if mixed else y[-1].clone()), cs[-1].clone(), gates, cs, tanh_c


@_lstm_forward.register_fake
def _(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, bias, cut):  # type: ignore[no-untyped-def]
    T, B, _ = x.shape
    H = w_hh.shape[1]
    cell = c0.new_empty(T, B, H)
    y, gates = x.new_empty(T, B, H), c0.new_empty(T, B, 4 * H)
    return y, c0.new_empty(B, H), c0.new_empty(B, H), gates, cell, torch.empty_like(cell)


@custom_op("holdfast::lstm_portable_backward", mutates_args=())
def _lstm_backward(
    dy: Optional[Tensor],
    dh_n: Optional[Tensor],
    dc_n: Optional[Tensor],
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    resets: Optional[Tensor],
    fill_h: Optional[Tensor],
    fill_c: Optional[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    y: Tensor,
    gates: Tensor,
    cs: Tensor,
    tanh_c: Tensor,
    cut: bool,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dh0, dc0, dfill_h, dfill_c, dW_ih, dW_hh, dbias."""
    T, B, H = y.shape
    D, S = x.dtype, c0.dtype
    w = _to_gifo(w_hh)
    dgates = torch.empty_like(gates) if D == S else gates.new_empty(gates.shape, dtype=D)
    dh = torch.zeros_like(c0) if dh_n is None else dh_n.to(S, copy=True)
    dc = torch.zeros_like(c0) if dc_n is None else dc_n.clone()
    dfill_h, dfill_c = c0.new_zeros(H), c0.new_zeros(H)
    any_reset = _reset_steps(resets, T)
    masks = resets.unsqueeze(-1).unbind(0) if resets is not None else ()
    c_prev = _previous(c0, cs, resets, fill_c, cut)
    dys = None if dy is None else dy.to(S).unbind(0)
    tanh_backward, sigmoid_backward = torch.ops.aten.tanh_backward, torch.ops.aten.sigmoid_backward

    steps = max(1, _CHUNK // max(1, B * H))
    for end in range(T, 0, -steps):
        begin = max(0, end - steps)
        span = slice(begin, end)
        g, i, f, o = gates[span].split(H, dim=-1)
        tc = tanh_c[span]
        d = dgates[span] if D == S else gates.new_empty(gates[span].shape)
        # What multiplies dc (for g, i, f) or dh (for o), in place of the gate gradients.
        d[..., :H].copy_(tanh_backward(i, g))
        d[..., H : 2 * H].copy_(sigmoid_backward(g, i))
        d[..., 2 * H : 3 * H].copy_(sigmoid_backward(c_prev[span], f))
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
                dh.copy_(_mm(dgates[t], w))
            if any_reset[t]:
                if fill_h is not None and not cut:
                    dfill_h += dh.where(masks[t], 0.0).sum(0)
                    dfill_c += dc.where(masks[t], 0.0).sum(0)
                dh.masked_fill_(masks[t], 0.0)
                dc.masked_fill_(masks[t], 0.0)

    flat = dgates.view(T * B, 4 * H)
    h_prev = _previous(h0, y, resets, fill_h, cut) if need_w else y
    dx, dw_ih, dw_hh = _input_and_weight_grads(flat, flat, x, h_prev, _to_gifo(w_ih), need_x, need_w)
    if not need_w:
        return dx, dh, dc, dfill_h, dfill_c, dw_ih, dw_hh, c0.new_empty(0)
    dbias = _from_gifo(flat.sum(0, dtype=S).to(D))
    return dx, dh, dc, dfill_h, dfill_c, _from_gifo(dw_ih), _from_gifo(dw_hh), dbias


@_lstm_backward.register_fake
def _(dy, dh_n, dc_n, x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, y, gates, cs, tanh_c, cut, need_x, need_w):  # type: ignore[no-untyped-def]
    H = w_hh.shape[1]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    dw_ih = w_ih.new_empty(w_ih.shape) if need_w else x.new_empty(0)
    dw_hh = w_hh.new_empty(w_hh.shape) if need_w else x.new_empty(0)
    dbias = w_hh.new_empty(4 * H) if need_w else c0.new_empty(0)
    dh0, dc0 = c0.new_empty(c0.shape), c0.new_empty(c0.shape)
    return dx, dh0, dc0, c0.new_empty(H), c0.new_empty(H), dw_ih, dw_hh, dbias


def _lstm_save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, _bias, cut = inputs
    y, _, _, gates, cs, tanh_c = output
    ctx.save_for_backward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, y, gates, cs, tanh_c)
    ctx.cut = cut
    ctx.set_materialize_grads(False)


def _lstm_grad(ctx, dy, dh_n, dc_n, *_):  # type: ignore[no-untyped-def]
    need = ctx.needs_input_grad
    need_w = need[6] or need[7] or need[8]
    dx, dh0, dc0, dfill_h, dfill_c, dw_ih, dw_hh, dbias = _lstm_backward(
        dy, dh_n, dc_n, *ctx.saved_tensors, ctx.cut, need[0], need_w
    )
    grads = (dx, dh0, dc0, None, dfill_h, dfill_c, dw_ih, dw_hh, dbias)
    return *(g if n else None for g, n in zip(grads, need)), None


_lstm_forward.register_autograd(_lstm_grad, setup_context=_lstm_save)


def lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.lstm`."""
    return lstm_with_cells(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut=cut)[:3]


def lstm_with_cells(*arguments: Optional[Tensor], cut: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `lstm`, and the cell state after every step, [T, B, H], without gradients."""
    *inputs, b_ih, b_hh = arguments
    bias = None if b_ih is None or b_hh is None else b_ih + b_hh
    y, h_n, c_n, _, cs, _ = _lstm_forward(*inputs, bias, cut)
    return y, h_n, c_n, cs.detach()


def _enter_rows(state: Tensor, rows: Tensor, fill: Tensor | None) -> Tensor:
    """The state with `rows` reset. On the host several times cheaper than a mask, where few rows are reset."""
    if fill is None:
        return state.index_fill(0, rows, 0.0)
    return state.index_copy(0, rows, fill.expand(len(rows), -1))


def lstm_step(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One step on the host without gradients: x [B, I], resets [B] -> (h, c). No operator call, no mask."""
    if resets is not None:
        rows = resets.nonzero().squeeze(1)
        if len(rows):
            h, c = _enter_rows(h, rows, fill_h), _enter_rows(c, rows, fill_c)
    gates = torch.mm(x, w_ih.t()) if b_ih is None or b_hh is None else torch.addmm(b_ih + b_hh, x, w_ih.t())
    i, f, g, o = gates.addmm_(h, w_hh.t()).chunk(4, 1)
    # tanh(a) is 2 sigmoid(2a) - 1, and torch's sigmoid is four times faster than its tanh.
    i, o = torch.sigmoid(i), torch.sigmoid(o)
    c = torch.sigmoid(f).mul_(c).sub_(i).addcmul_(i, torch.mul(g, 2).sigmoid_(), value=2)
    return torch.mul(c, 2).sigmoid_().mul_(o).mul_(2).sub_(o), c


# --- GRU -----------------------------------------------------------------------------------------------------------


@custom_op("holdfast::gru_portable", mutates_args=())
def _gru_forward(
    x: Tensor,
    h0: Tensor,
    resets: Optional[Tensor],
    fill_h: Optional[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Optional[Tensor],
    b_hh: Optional[Tensor],
    cut: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, h_n and what the backward needs: activated gates r, z, n [T, B, 3H], the hidden part of n [T, B, H], and h
    in the state's dtype [T, B, H] (empty where that is y)."""
    T, B, _ = x.shape
    H = w_hh.shape[1]
    S = h0.dtype
    mixed = x.dtype != S
    bias = b_ih
    if b_ih is not None and b_hh is not None:  # the hidden bias of n sits inside the product with r
        bias = torch.cat([b_ih[: 2 * H] + b_hh[: 2 * H], b_ih[2 * H :]])
    projected = _project(x, w_ih, bias)
    gates = projected.to(S) if mixed else projected
    hidden_n = h0.new_empty(T, B, H)
    y = x.new_empty(T, B, H)
    h_full = h0.new_empty(T, B, H) if mixed else h0.new_empty(0)
    w_rz, w_n = w_hh[: 2 * H].t(), w_hh[2 * H :].t()
    bias_n = x.new_zeros(H) if b_hh is None else b_hh[2 * H :]

    any_reset = _reset_steps(None if cut else resets, T)
    masks = resets.unsqueeze(-1).unbind(0) if resets is not None else ()
    pre_rz, act_rz = projected[..., : 2 * H].unbind(0), gates[..., : 2 * H].unbind(0)
    r_, z_, n_ = (gates[..., k * H : (k + 1) * H].unbind(0) for k in range(3))
    hn_, y_, h_ = hidden_n.unbind(0), y.unbind(0), (h_full if mixed else y).unbind(0)
    h = h0
    for t in range(T):
        if any_reset[t]:
            h = _enter(h, masks[t], fill_h)
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
    return y, h.clone(), gates, hidden_n, h_full


@_gru_forward.register_fake
def _(x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut):  # type: ignore[no-untyped-def]
    T, B, _ = x.shape
    H = w_hh.shape[1]
    gates, hidden_n = h0.new_empty(T, B, 3 * H), h0.new_empty(T, B, H)
    h_full = h0.new_empty(T, B, H) if h0.dtype != x.dtype else h0.new_empty(0)
    return x.new_empty(T, B, H), h0.new_empty(B, H), gates, hidden_n, h_full


@custom_op("holdfast::gru_portable_backward", mutates_args=())
def _gru_backward(
    dy: Optional[Tensor],
    dh_n: Optional[Tensor],
    x: Tensor,
    h0: Tensor,
    resets: Optional[Tensor],
    fill_h: Optional[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    y: Tensor,
    gates: Tensor,
    hidden_n: Tensor,
    h_full: Tensor,
    cut: bool,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dh0, dfill_h, dW_ih, dW_hh, db_ih, db_hh."""
    T, B, H = y.shape
    D, S = x.dtype, h0.dtype
    dgh = x.new_empty(T, B, 3 * H)  # gradients of the hidden-side pre-activations: r, z, n
    dn_in = x.new_empty(T, B, H)  # of n on the input side; r and z are the same on both
    dh = torch.zeros_like(h0) if dh_n is None else dh_n.clone()
    dfill_h = h0.new_zeros(H)
    any_reset = _reset_steps(resets, T)
    masks = resets.unsqueeze(-1).unbind(0) if resets is not None else ()
    h_prev = _previous(h0, y if D == S else h_full, resets, fill_h, cut)
    dys = None if dy is None else dy.to(S).unbind(0)
    tanh_backward, sigmoid_backward = torch.ops.aten.tanh_backward, torch.ops.aten.sigmoid_backward

    steps = max(1, _CHUNK // max(1, B * H))
    for end in range(T, 0, -steps):
        begin = max(0, end - steps)
        span = slice(begin, end)
        r, z, n = gates[span].split(H, dim=-1)
        dhs = gates.new_empty(end - begin, B, H)
        # What multiplies dh for each gate, in place of the gate gradients.
        k_n = tanh_backward(1 - z, n)
        d = dgh[span] if D == S else gates.new_empty(end - begin, B, 3 * H)
        torch.mul(sigmoid_backward(hidden_n[span], r), k_n, out=d[..., :H])
        d[..., H : 2 * H].copy_(sigmoid_backward(h_prev[span] - n, z))
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
                dh += _mm(dgh[t], w_hh)
            if any_reset[t]:
                if fill_h is not None and not cut:
                    dfill_h += dh.where(masks[t], 0.0).sum(0)
                dh.masked_fill_(masks[t], 0.0)
        torch.mul(k_n, dhs, out=dn_in[span]) if D == S else dn_in[span].copy_(k_n * dhs)

    dgx = torch.cat([dgh[..., : 2 * H], dn_in], dim=-1).view(T * B, 3 * H)
    flat = dgh.view(T * B, 3 * H)
    dx, dw_ih, dw_hh = _input_and_weight_grads(dgx, flat, x, h_prev.to(D), w_ih, need_x, need_w)
    if not need_w:
        return dx, dh, dfill_h, dw_ih, dw_hh, h0.new_empty(0), h0.new_empty(0)
    return dx, dh, dfill_h, dw_ih, dw_hh, dgx.sum(0, dtype=S).to(D), flat.sum(0, dtype=S).to(D)


@_gru_backward.register_fake
def _(dy, dh_n, x, h0, resets, fill_h, w_ih, w_hh, y, gates, hidden_n, h_full, cut, need_x, need_w):  # type: ignore[no-untyped-def]
    H = w_hh.shape[1]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    if need_w:
        dw = w_ih.new_empty(w_ih.shape), w_hh.new_empty(w_hh.shape), w_hh.new_empty(3 * H), w_hh.new_empty(3 * H)
    else:
        dw = x.new_empty(0), x.new_empty(0), h0.new_empty(0), h0.new_empty(0)
    return dx, h0.new_empty(h0.shape), h0.new_empty(H), *dw


def _gru_save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, h0, resets, fill_h, w_ih, w_hh, _b_ih, _b_hh, cut = inputs
    y, _, gates, hidden_n, h_full = output
    ctx.save_for_backward(x, h0, resets, fill_h, w_ih, w_hh, y, gates, hidden_n, h_full)
    ctx.cut = cut
    ctx.set_materialize_grads(False)


def _gru_grad(ctx, dy, dh_n, *_):  # type: ignore[no-untyped-def]
    need = ctx.needs_input_grad
    need_w = any(need[4:8])
    dx, dh0, dfill_h, dw_ih, dw_hh, db_ih, db_hh = _gru_backward(dy, dh_n, *ctx.saved_tensors, ctx.cut, need[0], need_w)
    grads = (dx, dh0, None, dfill_h, dw_ih, dw_hh, db_ih, db_hh)
    return *(g if n else None for g, n in zip(grads, need)), None


_gru_forward.register_autograd(_gru_grad, setup_context=_gru_save)


def gru(
    x: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `reference.gru`."""
    y, h_n, *_ = _gru_forward(x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut)
    return y, h_n


def gru_step(
    x: Tensor,
    h: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Tensor:
    """One step on the host without gradients: x [B, I], resets [B] -> h. No operator call, no mask."""
    if resets is not None:
        rows = resets.nonzero().squeeze(1)
        if len(rows):
            h = _enter_rows(h, rows, fill_h)
    xr, xz, xn = (torch.mm(x, w_ih.t()) if b_ih is None else torch.addmm(b_ih, x, w_ih.t())).chunk(3, 1)
    hr, hz, hn = (torch.mm(h, w_hh.t()) if b_hh is None else torch.addmm(b_hh, h, w_hh.t())).chunk(3, 1)
    r, z = torch.add(xr, hr).sigmoid_(), torch.add(xz, hz).sigmoid_()
    n = torch.addcmul(xn, r, hn).mul_(2).sigmoid_().mul_(2).sub_(1)  # tanh, as above
    return torch.lerp(n, h, z)
