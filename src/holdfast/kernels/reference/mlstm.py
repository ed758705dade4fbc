"""The matrix memory of an mLSTM, as specified: a loop of steps over time.

C = f R C + i v k^T    # a matrix [d, d] per head; f = exp(log_f), gates are one number per head
y = C q

R turns what is stored under a key: channels c and P + c of the keys are a plane that turns by angles[h, c] in each step,
the others stay. So a query finds a value by the content of its key, by its age, or by both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.operands import MatrixInputs, Resets
from holdfast.kernels.reference.resets import reset


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] with its first 2 P channels turned, cos and sin [..., P]."""
    P = cos.shape[-1]
    one, other, rest = x.split([P, P, x.shape[-1] - 2 * P], dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos, rest], dim=-1)


def step(inputs: MatrixInputs, memory: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """One step of [B, h, ...] from a memory [B, h, d, d] that is already reset: y [B, h, d], the new memory."""
    q, k, v, i, log_f = inputs
    written = (i.unsqueeze(-1) * v).unsqueeze(-1) * k.unsqueeze(-2)
    angles = angles.unsqueeze(1)  # [h, 1, P]: the same for all values
    memory = log_f.exp()[..., None, None] * turn(memory, angles.cos(), angles.sin()) + written
    return torch.matmul(memory, q.unsqueeze(-1)).squeeze(-1), memory


def sequence(inputs: MatrixInputs, memory: Tensor, resets: Resets, angles: Tensor) -> tuple[Tensor, Tensor]:
    """inputs [T, B, h, ...]; memory [B, h, d, d]; resets.h [h, d, d]; angles [h, P] -> y [T, B, h, d], the final memory."""
    ys = []
    fill = None if resets.h is None else resets.h.flatten()
    for t, parts in enumerate(zip(*inputs)):
        rows = None if resets.mask is None else resets.mask[t]
        memory = reset(memory.flatten(1), rows, fill, resets.detach).view_as(memory)
        y, memory = step(MatrixInputs(*parts), memory, angles)
        ys.append(y)
    return torch.stack(ys), memory
