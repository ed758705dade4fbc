"""The specification of each recurrence: a plain loop over time, any dtype, differentiated by autograd.

Every fast kernel computes exactly these functions, with the same arguments, and is tested against them in
float64. Nothing here is meant to be fast.

Shapes of one layer: x [T, B, I]; h0, c0 [B, H]; resets [T, B] bool or None; fill_h, fill_c [H] or None (zeros);
weights and biases as in torch.nn: LSTM gates in the order i, f, g, o (w_ih [4H, I], w_hh [4H, H], b [4H] or None),
GRU gates r, z, n (3H). Returns y [T, B, H] and the final state.

Resets: before step t, rows with resets[t, b] continue from (fill_h, fill_c) instead of their state. With
`cut=True` (reset mode "detach") the value goes on and only its gradient is cut; the fills are not used.

Dtypes: x and the weights share one dtype D, the state has dtype S, which is D or wider (autocast: D half, S
float32). Products run in D, the pointwise part and the carried state in S, y comes back in D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _reset(state: Tensor, reset: Tensor | None, fill: Tensor | None, cut: bool) -> Tensor:
    if reset is None:
        return state
    mask = reset.unsqueeze(-1)  # [B, 1]
    if cut:
        return torch.where(mask, state.detach(), state)
    if fill is None:
        return state.masked_fill(mask, 0.0)
    return torch.where(mask, fill.to(state.dtype), state)


def lstm_step(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One step of [B, I] from an already reset state: (h, c)."""
    gates = (F.linear(x, w_ih, b_ih) + F.linear(h.to(x.dtype), w_hh, b_hh)).to(c.dtype)
    i, f, g, o = gates.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_step(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor:
    """One step of [B, I] from an already reset state: h."""
    xr, xz, xn = F.linear(x, w_ih, b_ih).to(h.dtype).chunk(3, dim=-1)
    hr, hz, hn = F.linear(h.to(x.dtype), w_hh, b_hh).to(h.dtype).chunk(3, dim=-1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return (1 - z) * n + z * h


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
    """One LSTM layer over a sequence: y [T, B, H], h_n [B, H], c_n [B, H]."""
    h, c, ys = h0, c0, []
    for t, x_t in enumerate(x.unbind(0)):
        reset = None if resets is None else resets[t]
        h, c = _reset(h, reset, fill_h, cut), _reset(c, reset, fill_c, cut)
        h, c = lstm_step(x_t, h, c, w_ih, w_hh, b_ih, b_hh)
        ys.append(h.to(x.dtype))
    return torch.stack(ys), h, c


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
    """One GRU layer over a sequence: y [T, B, H], h_n [B, H]."""
    h, ys = h0, []
    for t, x_t in enumerate(x.unbind(0)):
        h = _reset(h, None if resets is None else resets[t], fill_h, cut)
        h = gru_step(x_t, h, w_ih, w_hh, b_ih, b_hh)
        ys.append(h.to(x.dtype))
    return torch.stack(ys), h
