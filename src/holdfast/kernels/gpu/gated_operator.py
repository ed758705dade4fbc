"""One LSTM or GRU layer on a GPU by `kernels/cuda`, with autograd. A GRU is a call with c0 = None."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.cuda import gated_layer
from holdfast.kernels.cuda.padding import padded_size, run_padded
from holdfast.kernels.cuda.plans import Saved, kept_layout
from holdfast.kernels.gated_operator import Kept, Outputs, make_operator
from holdfast.kernels.operands import Gradients, Needed, Resets, Weights

_NO_RESETS = Resets()
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(gates: int, x: Tensor, hidden_size: int, state_dtype: torch.dtype) -> bool:
    """Whether the CUDA kernels take this layer: sizes, dtypes and device. gates: 4 for an LSTM, 3 for a GRU."""
    if x.dtype not in _DTYPES or state_dtype not in _DTYPES or x.numel() == 0 or not x.is_cuda:
        return False
    return gated_layer.supports(gates, padded_size(hidden_size), x.get_device())


def _forward(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, keep: bool) -> Outputs:
    if resets.mask is None or resets.detach:  # "detach" concerns the backward only
        resets = _NO_RESETS
    y, h_n, c_n, kept = gated_layer.forward(x, h0, c0, resets, weights, keep)
    return Outputs(y, h_n, c_n, None, () if kept is None else (kept,))


def _new_outputs(x: Tensor, h0: Tensor, w_hh: Tensor, is_lstm: bool, keep: bool) -> Outputs:
    (T, B, inputs), (gate_rows, hidden) = x.shape, w_hh.shape
    size = kept_layout(T * B, inputs, hidden, gate_rows // hidden)[2]
    h_n, c_n = h0.new_empty(B, hidden), h0.new_empty(B, hidden) if is_lstm else None
    return Outputs(
        x.new_empty(T, B, hidden), h_n, c_n, None, (h0.new_empty(size, dtype=torch.float16),) if keep else ()
    )


def _backward(dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    x, h0, weights = kept.x, kept.h0, kept.weights
    saved = Saved(kept.kept[0], kept.resets.mask, weights.w_ih, weights.w_hh, h0.shape[0], h0.dtype, x.dtype)
    needs = needed.x, needed.h0 or needed.c0, needed.reset_h or needed.reset_c
    return gated_layer.backward(dy, dh_n, dc_n, saved, *needs)


_layer = make_operator("recurrence_gpu", _forward, _backward, _new_outputs)


def sequence(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor, Any]:
    """y, h_n, c_n (None, or empty under torch.compile, for a GRU). Other hidden sizes are padded to one that the kernels take."""
    if h0.shape[1] == padded_size(h0.shape[1]):
        return _unpadded(x, h0, c0, resets, weights)
    return run_padded(_unpadded, x, h0, c0, resets, weights)


def _unpadded(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor, Any]:
    return _layer(x, h0, c0, resets, weights)[:3]


class lstm:
    """As the module `reference.lstm`. Products in fp16, state in fp32."""

    sequence = staticmethod(sequence)


class gru:
    """As the module `reference.gru`. Products in fp16, state in fp32."""

    @staticmethod
    def sequence(x: Tensor, h0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor]:
        return sequence(x, h0, None, resets, weights)[:2]
