"""The reset rule of the reference kernels. `cores/gated.py` turns a reset mode into the arguments of the fast ones."""

from __future__ import annotations

import torch
from torch import Tensor


def reset(state: Tensor, rows: Tensor | None, value: Tensor | None, detach: bool) -> Tensor:
    """`state` [B, H] with `rows` [B] replaced by `value` [H] (None: zeros), or only their gradient stopped."""
    if rows is None:
        return state
    mask = rows.unsqueeze(-1)  # [B, 1]
    if detach:
        return torch.where(mask, state.detach(), state)
    if value is None:
        return state.masked_fill(mask, 0.0)
    return torch.where(mask, value.to(state.dtype), state)
