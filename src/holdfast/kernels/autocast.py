"""Parts that compute in the dtype they are given, also under `torch.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off. Nothing at all where it is off already: a step takes only microseconds."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
