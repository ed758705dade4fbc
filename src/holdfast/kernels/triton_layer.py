"""Whole LSTM and GRU layers with the Triton recurrences, for GPUs and sizes that the CUDA kernels do not take.

Hidden sizes up to 128. Same functions as `cuda_recurrence.py`; the conversions here are plain torch operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels import half_products, triton_gru, triton_lstm
from holdfast.kernels.half_products import Gradients, half_product, packed_layout


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def forward(
    x: Tensor,
    h0: Tensor,
    carry0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `cuda_recurrence.forward`."""
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    packed = half_products.pack_inputs(x, hidden)
    pre = torch.mm(packed[:, :inputs], w_ih.to(torch.float16).t())
    y = torch.empty(steps, batch, hidden, dtype=x.dtype, device=x.device)
    saved = pre.new_empty((steps * batch, hidden) if save else (0,))
    recurrence = triton_lstm if w_hh.shape[0] == 4 * hidden else triton_gru
    h_n, carry = recurrence.forward(
        pre, w_hh.contiguous(), b_ih, b_hh, h0.float().contiguous(), carry0.float().contiguous(),
        None if resets is None else resets.contiguous(), _fp32(fill_h), _fp32(fill_c), y,
        packed[:, packed_layout(inputs, hidden)[0] :], saved, save,
    )  # fmt: skip
    if not save:
        packed, pre = packed.new_empty(0), packed.new_empty(0)
    return y, h_n.to(h0.dtype), carry.to(carry0.dtype), packed, pre, saved


def backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    packed: Tensor,
    pre: Tensor,
    saved: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    x_dtype: torch.dtype,
    need_dx: bool,
    fill: bool,
) -> Gradients:
    """As `cuda_recurrence.backward`."""
    batch, hidden = h0.shape
    rows, inputs = packed.shape[0], w_ih.shape[1]
    first = packed_layout(inputs, hidden)[0]
    dy = None if dy is None else dy.contiguous()
    amax_bits = half_products.gradient_amax_bits(dy, dh_n, dc_n)
    inverse = half_products.inverse_scale(amax_bits)
    lstm = w_hh.shape[0] == 4 * hidden
    d_gates, dh0, dc0, d_fill_h, d_fill_c = (triton_lstm if lstm else triton_gru).backward(
        pre, saved, packed[:, first:], w_hh.contiguous(), None if resets is None else resets.contiguous(), dy,
        _fp32(dh_n), _fp32(dc_n), amax_bits, rows // batch, fill,
    )  # fmt: skip
    # Rows of d_gates that belong to the rows of the weights; the GRU's order is n, r, z, r * n.
    units = torch.arange((4 if lstm else 3) * hidden, device=h0.device)
    input_rows = units if lstm else units.roll(-hidden)
    hidden_rows = units if lstm else units + hidden
    dx = None
    if need_dx:
        dx = (half_product(d_gates[:, input_rows], w_ih.to(torch.float16)) * inverse).to(x_dtype)
        dx = dx.view(rows // batch, batch, inputs)
    dw = half_product(d_gates.t(), packed) * inverse
    db = (d_gates.sum(0, dtype=torch.float32) * inverse).to(w_ih.dtype)
    return Gradients(
        dx,
        dh0.to(h0.dtype),
        dc0.to(h0.dtype),
        d_fill_h,
        d_fill_c,
        dw[input_rows, :inputs].to(w_ih.dtype),
        dw[hidden_rows, first : first + hidden].to(w_hh.dtype),
        db[input_rows],
        db[hidden_rows],
    )
