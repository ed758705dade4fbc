"""The GPU kernels behind one interface: `lstm`, `gru`, `lstm_step`, `gru_step` and what they take.

Same functions as `reference.py`. `precision="fast"` (products in fp16 with fp32 sums, state in fp32: about TF32's
accuracy) runs the kernels of this folder; `precision="exact"` runs the portable loop in full fp32. docs/kernels.md
explains the design.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels import gpu_gru, gpu_lstm, portable
from holdfast.kernels.cuda import step as cuda_step
from holdfast.kernels.cuda.step import gru_step, lstm_step
from holdfast.kernels.gpu_backend import has_backend

__all__ = ["gru", "gru_step", "lstm", "lstm_step", "supports", "supports_step"]


def supports(recurrence: str, x: Tensor, hidden_size: int, state_dtype: torch.dtype) -> bool:
    """Whether `lstm` or `gru` takes this sequence [T, B, I] and a state of this kind with `precision="fast"`."""
    return has_backend(4 if recurrence == "lstm" else 3, x, hidden_size, state_dtype)


def supports_step(recurrence: str, x: Tensor, h: Tensor) -> bool:
    """Whether the fused step takes this input [B, I] and state [B, H]."""
    return cuda_step.supports(x, h)


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
    precision: str = "fast",
) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM layer over a sequence: y [T, B, H], h_n [B, H], c_n [B, H]."""
    run = portable.lstm if precision == "exact" else gpu_lstm.lstm
    return run(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut)


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
    precision: str = "fast",
) -> tuple[Tensor, Tensor]:
    """One GRU layer over a sequence: y [T, B, H], h_n [B, H]."""
    run = portable.gru if precision == "exact" else gpu_gru.gru
    return run(x, h0, resets, fill_h, w_ih, w_hh, b_ih, b_hh, cut)
