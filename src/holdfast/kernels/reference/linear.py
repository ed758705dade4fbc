"""The linear recurrence, as specified: h[t] = a[t] h[t-1] + b[t], a loop over time in any dtype.

Shapes: b and the result [T, B, W]; h0 [B, W]; a [T, B, W] or, the same for every step and row, [W]; `resets.h` [W] is
the fill. All have one dtype. Forms:

- "real": W numbers per row.
- "complex": W / 2 complex numbers per row: first all real parts, then all imaginary parts.
- "gated": b is [T, B, 2W], a gate before its sigmoid and a candidate: h[t] = (1 - z) h[t-1] + z candidate. a is None.

Before step t, rows with resets.mask[t, b] continue from the fill (None: zeros) instead of their state: it is selected, so
nothing of the old state is left, not even a NaN. With `resets.detach` the values go on and only their gradient stops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.operands import Resets
from holdfast.kernels.reference.resets import reset


def sequence(a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str = "real") -> tuple[Tensor, Tensor]:
    """The state after every step, [T, B, W], and the last of them, [B, W]."""
    h, states = h0, []
    for t, b_t in enumerate(b.unbind(0)):
        h = reset(h, None if resets.mask is None else resets.mask[t], resets.h, resets.detach)
        if a is None:
            gate, candidate = b_t.chunk(2, dim=-1)
            z = torch.sigmoid(gate)
            h = (1 - z) * h + z * candidate
        else:
            a_t = a if a.dim() == 1 else a[t]
            h = (complex_product(a_t, h) if form == "complex" else a_t * h) + b_t
        states.append(h)
    return torch.stack(states), h.clone()


def complex_product(a: Tensor, h: Tensor) -> Tensor:
    """Of numbers whose last dimension holds first all real parts, then all imaginary parts."""
    (a_re, a_im), (h_re, h_im) = a.chunk(2, dim=-1), h.chunk(2, dim=-1)
    return torch.cat([a_re * h_re - a_im * h_im, a_re * h_im + a_im * h_re], dim=-1)
