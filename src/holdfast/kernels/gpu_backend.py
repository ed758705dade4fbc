"""Which GPU implementation runs a recurrence: CUDA C++ where it can, Triton for other GPUs and sizes up to 128."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from holdfast.kernels import cuda_recurrence, triton_gru, triton_lstm
from holdfast.kernels.half_products import convert, mm_fp32, pack_inputs, pack_width, project


def backend(gates: int, hidden_size: int, batch: int, device: torch.device) -> ModuleType:
    """The module whose `forward` and `backward` run this size."""
    if cuda_recurrence.supports(gates, hidden_size, batch, device):
        return cuda_recurrence
    return triton_lstm if gates == 4 else triton_gru


def _as_fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def sequence_forward(
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
    """y, h_n, the other final state, and what the backward needs: packed [x | h], gates, saved [T*B, ...] fp16."""
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    packed = pack_inputs(x.contiguous(), hidden if save else 0)
    gates = project(packed, w_ih)
    y = torch.empty(steps, batch, hidden, dtype=x.dtype, device=x.device)
    if save:
        h_in, saved = packed[:, pack_width(inputs, hidden)[0] :], gates.new_empty(steps * batch, hidden)
    else:
        h_in, saved = gates.new_empty(2 * batch, hidden), gates.new_empty(0)
    run = backend(w_hh.shape[0] // hidden, hidden, batch, x.device)
    start = h0.float().contiguous()
    h_n, carry_n = run.forward(
        gates, w_hh.to(torch.float16), _as_fp32(b_ih), _as_fp32(b_hh), start,
        start if carry0 is h0 else carry0.float().contiguous(), None if resets is None else resets.contiguous(),
        _as_fp32(fill_h), _as_fp32(fill_c), y, h_in, saved, save,
    )  # fmt: skip
    if not save:
        packed, gates = packed.new_empty(0), packed.new_empty(0)
    return y, h_n.to(h0.dtype), carry_n.to(carry0.dtype), packed, gates, saved


def input_gradient(
    d_gates: Tensor, w_ih: Tensor, amax_bits: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """dx from the scaled gradients of the gates the input reaches."""
    dx = torch.empty(shape, dtype=dtype, device=d_gates.device)
    convert(torch.mm(d_gates, w_ih.to(torch.float16)), dx.view(-1, shape[-1]), amax_bits)
    return dx


def weight_gradients(d_gates: Tensor, packed: Tensor) -> Tensor:
    """[4H, width of packed] fp32, scaled: all gate gradients against [x | h] in one product over T*B."""
    return mm_fp32(d_gates.t(), packed)
