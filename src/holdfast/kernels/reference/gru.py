"""The GRU, as specified: one step, and a loop of steps over time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.operands import Resets, Weights
from holdfast.kernels.reference.resets import reset


def cell(x: Tensor, h: Tensor, weights: Weights) -> Tensor:
    """One step of [B, I] from a state that is already reset: h."""
    w_ih, w_hh, b_ih, b_hh = weights
    xr, xz, xn = F.linear(x, w_ih, b_ih).to(h.dtype).chunk(3, dim=-1)
    hr, hz, hn = F.linear(h.to(x.dtype), w_hh, b_hh).to(h.dtype).chunk(3, dim=-1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return (1 - z) * n + z * h


def sequence(x: Tensor, h0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor]:
    """One GRU layer over a sequence: y [T, B, H], h_n [B, H]."""
    h, ys = h0, []
    for t, x_t in enumerate(x.unbind(0)):
        h = reset(h, None if resets.mask is None else resets.mask[t], resets.h, resets.detach)
        h = cell(x_t, h, weights)
        ys.append(h.to(x.dtype))
    return torch.stack(ys), h
