"""The matrix memory of an mLSTM, as specified: a loop of steps over time.

C = f C + i v k^T    # a matrix [d, d] per head; f = exp(log_f), gates are one number per head
y = C q
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.operands import MatrixInputs, Resets
from holdfast.kernels.reference.resets import reset


def step(inputs: MatrixInputs, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One step of [B, h, ...] from a memory [B, h, d, d] that is already reset: y [B, h, d], the new memory."""
    q, k, v, i, log_f = inputs
    written = (i.unsqueeze(-1) * v).unsqueeze(-1) * k.unsqueeze(-2)
    # What is forgotten, not what is kept: 1 - 1/1000, rounded to float32, is wrong by 3e-5 of it after 1000 steps.
    change = torch.addcmul(written, torch.expm1(log_f)[..., None, None], memory)
    memory = memory + change
    return torch.matmul(memory, q.unsqueeze(-1)).squeeze(-1), memory


def sequence(inputs: MatrixInputs, memory: Tensor, resets: Resets) -> tuple[Tensor, Tensor]:
    """inputs [T, B, h, ...]; memory [B, h, d, d]; resets.h [h, d, d] -> y [T, B, h, d], the final memory."""
    ys = []
    fill = None if resets.h is None else resets.h.flatten()
    for t, parts in enumerate(zip(*inputs)):
        rows = None if resets.mask is None else resets.mask[t]
        memory = reset(memory.flatten(1), rows, fill, resets.detach).view_as(memory)
        y, memory = step(MatrixInputs(*parts), memory)
        ys.append(y)
    return torch.stack(ys), memory
