"""Whole LSTM and GRU layers with the Triton recurrences, for GPUs and sizes that the CUDA kernels do not take.

Hidden sizes up to 128. Same functions as `cuda_recurrence.py`; the conversions here are plain torch operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels import fp16_layout as half_products
from holdfast.kernels.fp16_layout import Gradients, half_product, packed_layout
from holdfast.kernels.triton import gru as triton_gru
from holdfast.kernels.triton import lstm as triton_lstm


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `cuda_recurrence.forward`."""
    steps, batch, inputs = x.shape
    gate_rows, hidden = w_hh.shape
    gates = gate_rows // hidden
    size = half_products.kept_layout(steps * batch, inputs, hidden, gates)[2]
    kept = torch.empty(size, dtype=torch.float16, device=x.device)
    packed, pre, saved = half_products.split_kept(kept, inputs, hidden, gates)
    half_products.pack_inputs(packed, x)
    torch.mm(packed[:, :inputs], w_ih.to(torch.float16).t(), out=pre)
    y = torch.empty(steps, batch, hidden, dtype=x.dtype, device=x.device)
    recurrence = triton_lstm if gates == 4 else triton_gru
    h_n, carry = recurrence.forward(
        pre, w_hh.contiguous(), b_ih, b_hh, h0.float().contiguous(), carry0.float().contiguous(),
        None if resets is None else resets.contiguous(), _fp32(fill_h), _fp32(fill_c), y,
        packed[:, packed_layout(inputs, hidden)[0] :], saved, save,
    )  # fmt: skip
    return y, h_n.to(h0.dtype), carry.to(carry0.dtype), kept if save else None


def backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    kept: Tensor,
    resets: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    batch: int,
    state_dtype: torch.dtype,
    x_dtype: torch.dtype,
    need_dx: bool,
    need_state: bool,
    fill: bool,
) -> Gradients:
    """As `cuda_recurrence.backward`."""
    gate_rows, hidden = w_hh.shape
    inputs, lstm = w_ih.shape[1], gate_rows == 4 * hidden
    packed, pre, saved = half_products.split_kept(kept, inputs, hidden, gate_rows // hidden)
    rows, first = packed.shape[0], packed_layout(inputs, hidden)[0]
    dy = None if dy is None else dy.contiguous()
    amax_bits = half_products.gradient_amax_bits(dy, dh_n, dc_n)
    inverse = half_products.inverse_scale(amax_bits)
    d_gates, dh0, dc0, d_fill_h, d_fill_c = (triton_lstm if lstm else triton_gru).backward(
        pre, saved, packed[:, first:], w_hh.contiguous(), None if resets is None else resets.contiguous(), dy,
        _fp32(dh_n), _fp32(dc_n), amax_bits, rows // batch, fill,
    )  # fmt: skip
    # Rows of d_gates that belong to the rows of the weights; the GRU's order is n, r, z, r * n.
    units = torch.arange(gate_rows, device=kept.device)
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
        dh0.to(state_dtype) if need_state else None,
        dc0.to(state_dtype) if need_state else None,
        d_fill_h,
        d_fill_c,
        dw[input_rows, :inputs].to(w_ih.dtype),
        dw[hidden_rows, first : first + hidden].to(w_hh.dtype),
        db[input_rows],
        db[hidden_rows],
    )
