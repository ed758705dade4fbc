"""The LSTM, as specified: one step, and a loop of steps over time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.operands import Resets, Weights
from holdfast.kernels.reference.resets import reset


def cell(x: Tensor, h: Tensor, c: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """One step of [B, I] from a state that is already reset: (h, c)."""
    w_ih, w_hh, b_ih, b_hh = weights
    gates = (F.linear(x, w_ih, b_ih) + F.linear(h.to(x.dtype), w_hh, b_hh)).to(c.dtype)
    i, f, g, o = gates.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def sequence(x: Tensor, h0: Tensor, c0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM layer over a sequence: y [T, B, H], h_n [B, H], c_n [B, H]."""
    h, c, ys = h0, c0, []
    for t, x_t in enumerate(x.unbind(0)):
        rows = None if resets.mask is None else resets.mask[t]
        h, c = reset(h, rows, resets.h, resets.detach), reset(c, rows, resets.c, resets.detach)
        h, c = cell(x_t, h, c, weights)
        ys.append(h.to(x.dtype))
    return torch.stack(ys), h, c
