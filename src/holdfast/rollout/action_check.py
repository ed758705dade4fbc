"""Whether a policy's actions fit the action space. The errors blame the policy: the environment would fail with them.

Structure costs nothing to look at. Numbers are read on the host only, and only for a policy's first steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from holdfast.policies.base import to_numpy

CHECKED_STEPS = 100
"""Steps whose actions are looked at. One step may miss an action that is rarely sampled."""


def check_actions(action: Tensor, space: spaces.Space[Any]) -> None:
    """Raise ValueError unless actions [B, ...] have the shape and type of a space and, on the host, are in its range.

    Actions of a Box are clipped to it and may have any type. Other spaces are not checked.
    """
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        return
    whole = isinstance(space, (spaces.Discrete, spaces.MultiDiscrete))
    expected = (*action.shape[:1], *(space.shape or ()))
    if tuple(action.shape) != expected or (whole and (action.is_floating_point() or action.dtype == torch.bool)):
        kind = "integers" if whole else "numbers"
        raise ValueError(
            f"the policy's actions have dtype {action.dtype} and shape {tuple(action.shape)}, the action space {space} takes "
            f"{kind} of shape {expected}; {_what_to_return(space)}"
        )
    if isinstance(space, spaces.Box) or not action.numel() or action.device.type != "cpu":
        return
    low, high = _range(space)
    numbers = to_numpy(action)
    outside = (numbers < low) | (numbers > high)
    if outside.any():
        allowed = f"{low} to {high}" if np.ndim(high) == 0 else f"0 to {np.asarray(high).tolist()}"
        raise ValueError(
            f"the policy chose the action {numbers[outside][0]}, the action space {space} allows {allowed}; "
            f"{_what_to_return(space)}"
        )


def _range(space: Any) -> tuple[Any, Any]:
    """The smallest and largest actions."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    return space.start, space.start + space.nvec - 1


def _what_to_return(space: Any) -> str:
    if isinstance(space, spaces.Discrete):
        shifted = f", its samples moved by {space.start}" if space.start else ""
        return f"let decode return Categorical(logits=...) with {space.n} logits per row{shifted}"
    if isinstance(space, spaces.MultiDiscrete):
        return f"let decode return a distribution over integers of shape {space.shape}, one per part"
    if isinstance(space, spaces.MultiBinary):
        return f"let decode return Independent(Bernoulli(logits=...), 1) with shape {space.shape} per row"
    return f"let decode return a distribution over numbers of shape {space.shape} per row, such as Independent(Normal(...), 1)"
