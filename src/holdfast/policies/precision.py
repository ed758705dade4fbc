"""The precision that a policy runs in. Rollout, update and evaluation use these two functions, so they cannot differ."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of products for a `TrainConfig.precision`; None: the parameters' own."""
    return torch.bfloat16 if precision == "bf16" else None


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """`torch.autocast` with this dtype; no-op for None."""
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)
