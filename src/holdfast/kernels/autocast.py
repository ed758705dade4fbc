"""Parts that compute in the dtype they are given, also under `torch.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast; None where it is off. torch refuses to say for the meta device."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off. Nothing at all where it is off already: a step takes only microseconds."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
