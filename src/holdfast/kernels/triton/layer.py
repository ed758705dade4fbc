"""Whole LSTM and GRU layers with the Triton recurrences, for GPUs and sizes that the CUDA kernels do not take.

Hidden sizes up to 128. Same functions as `cuda/recurrence.py`; the conversions here are plain torch operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels import fp16_layout
from holdfast.kernels.fp16_layout import Saved, half_product, packed_layout
from holdfast.kernels.operands import Gradients, Resets, Weights
from holdfast.kernels.triton import gru, lstm


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _contiguous(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous()


def forward(
    x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As `cuda.recurrence.forward`."""
    steps, batch, inputs = x.shape
    gate_rows, hidden = weights.w_hh.shape
    gates = gate_rows // hidden
    size = fp16_layout.kept_layout(steps * batch, inputs, hidden, gates)[2]
    kept = torch.empty(size, dtype=torch.float16, device=x.device)
    packed, pre, saved = fp16_layout.split_kept(kept, inputs, hidden, gates)
    fp16_layout.pack_inputs(packed, x)
    torch.mm(packed[:, :inputs], weights.w_ih.to(torch.float16).t(), out=pre)
    y = torch.empty(steps, batch, hidden, dtype=x.dtype, device=x.device)
    h_n, c_n = (gru if c0 is None else lstm).forward(
        pre, h0.float().contiguous(), _fp32(c0),
        Resets(_contiguous(resets.mask), _fp32(resets.h), _fp32(resets.c)),
        Weights(weights.w_ih, weights.w_hh.contiguous(), weights.b_ih, weights.b_hh), y,
        packed[:, packed_layout(inputs, hidden)[0] :], saved, save,
    )  # fmt: skip
    c_n = None if c0 is None or c_n is None else c_n.to(c0.dtype)
    return y, h_n.to(h0.dtype), c_n, kept if save else None


def backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    saved: Saved,
    need_x: bool,
    need_state: bool,
    need_reset: bool,
) -> Gradients:
    """As `cuda.recurrence.backward`."""
    kept, mask, w_ih, w_hh, batch, state_dtype, x_dtype = saved
    gate_rows, hidden = w_hh.shape
    inputs, is_lstm = w_ih.shape[1], gate_rows == 4 * hidden
    packed, pre, values = fp16_layout.split_kept(kept, inputs, hidden, gate_rows // hidden)
    rows, first = packed.shape[0], packed_layout(inputs, hidden)[0]
    dy = None if dy is None else dy.contiguous()
    amax_bits = fp16_layout.gradient_amax_bits(dy, dh_n, dc_n)
    inverse = fp16_layout.inverse_scale(amax_bits)
    d_gates, dh0, dc0, d_reset_h, d_reset_c = (lstm if is_lstm else gru).backward(
        pre, values, packed[:, first:], w_hh.contiguous(), _contiguous(mask), (dy, _fp32(dh_n), _fp32(dc_n)), amax_bits,
        rows // batch, need_reset,
    )  # fmt: skip
    # Rows of d_gates that belong to the rows of the weights; the GRU's order is n, r, z, r * n.
    units = torch.arange(gate_rows, device=kept.device)
    input_rows = units if is_lstm else units.roll(-hidden)
    hidden_rows = units if is_lstm else units + hidden
    dx = None
    if need_x:
        dx = (half_product(d_gates[:, input_rows], w_ih.to(torch.float16)) * inverse).to(x_dtype)
        dx = dx.view(rows // batch, batch, inputs)
    dw = half_product(d_gates.t(), packed) * inverse
    db = (d_gates.sum(0, dtype=torch.float32) * inverse).to(w_ih.dtype)
    return Gradients(
        x=dx,
        h0=dh0.to(state_dtype) if need_state else None,
        c0=dc0.to(state_dtype) if need_state and dc0 is not None else None,
        reset_h=d_reset_h,
        reset_c=d_reset_c,
        w_ih=dw[input_rows, :inputs].to(w_ih.dtype),
        w_hh=dw[hidden_rows, first : first + hidden].to(w_hh.dtype),
        b_ih=db[input_rows],
        b_hh=db[hidden_rows],
    )
