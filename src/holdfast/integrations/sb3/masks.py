"""Action masks with recurrence: where they come from, how they are passed on, how they change logits.

A mask is bool, True = allowed, in the layout of sb3-contrib's MaskablePPO: Discrete [n], MultiDiscrete [sum(nvec)],
MultiBinary [2 * n] (may be 0, may be 1, for each bit).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.utils import get_action_masks
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from holdfast.policies.heads import check_mask


class MaskedStates(NamedTuple):
    """sb3-contrib's RNNStates, and the masks of the steps that start from them."""

    pi: tuple[Tensor, ...]
    vf: tuple[Tensor, ...]
    action_masks: Tensor


class MaskSource:
    """Fetches the masks of the environments' current observations; keeps the last ones for the buffer."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.last: np.ndarray = np.empty(0)

    def fetch(self) -> np.ndarray:
        self.last = np.asarray(get_action_masks(self.env), dtype=bool).reshape(self.env.num_envs, -1)
        return self.last


def mask_size(space: spaces.Space[Any]) -> int:
    """Entries of one environment's mask."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.MultiBinary):
        return 2 * int(np.prod(space.shape))
    raise ValueError(
        f"action masks need Discrete, MultiDiscrete or MultiBinary actions, not {space}; remove action_masks()"
    )


def masked_logits(logits: Tensor, mask: Tensor, space: spaces.Space[Any]) -> Tensor:
    """Logits [N, ...] in which a forbidden action has probability 0."""
    mask = mask.reshape(logits.shape[0], -1)
    size = mask_size(space)
    if mask.shape[-1] != size:
        raise ValueError(f"the action mask has {mask.shape[-1]} entries per environment, expected {size} for {space}")
    if isinstance(space, spaces.MultiBinary):
        choices = mask.reshape(*logits.shape, 2)
        check_mask(choices, tuple(choices.shape), "of a bit")
        # Not infinite: torch's Bernoulli forms inf - inf. The sigmoid of 1e8 is exactly 1.
        return logits.masked_fill(~choices[..., 1], -1e8).masked_fill(~choices[..., 0], 1e8)
    heads = [int(n) for n in space.nvec.flatten()] if isinstance(space, spaces.MultiDiscrete) else [size]
    for part in mask.split(heads, -1):
        check_mask(part, tuple(part.shape), f"for {part.shape[-1]} actions")
    return logits.masked_fill(~mask, -torch.inf)
