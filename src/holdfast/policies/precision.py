"""The precision in which a policy runs. One function; which precision to use is the caller's decision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Inside, matrix products on `device` are computed in `dtype`; None leaves the precision as it is."""
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)
