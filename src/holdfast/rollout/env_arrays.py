"""Masks and saved states of vector environments, in the form that `VectorEnvAdapter` needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torch import Tensor


def masks_of(env: Any, timeout: float | None = None) -> Callable[[], Any] | None:
    """A function that gives the masks of all rows, if the environment or each of its copies has `action_masks()`.

    Copies may be in this process or in others, which have `timeout` seconds to answer.
    """
    if hasattr(env, "action_masks"):
        return env.action_masks
    copies = getattr(env, "unwrapped", env)
    if not isinstance(copies, (SyncVectorEnv, AsyncVectorEnv)):
        return None
    if not all(copies.call("has_wrapper_attr", "action_masks")):
        return None

    def ask() -> Any:
        copies = getattr(env, "unwrapped", env)  # looked up each time: those that failed have been replaced
        if timeout is None or not isinstance(copies, AsyncVectorEnv):
            return list(copies.call("action_masks"))  # a tuple would be the mask of a Tuple action space
        copies.call_async("action_masks")
        return list(copies.call_wait(timeout))

    return ask


def where_mask(rows: Tensor, mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Row b of `mask` where rows[b], of `other` elsewhere; None allows everything."""
    if mask is None:
        if other is None:
            return None
        mask = torch.ones_like(other)
    other = torch.ones_like(mask) if other is None else other
    return torch.where(rows.view(-1, *(1,) * (mask.dim() - 1)), mask, other)


_ARRAY = "numpy array"  # marks arrays in a saved environment's state, so that they load as arrays


def arrays_to_tensors(tree: Any) -> Any:
    """An environment's state as plain checkpoint data."""
    if isinstance(tree, dict):
        return {key: arrays_to_tensors(part) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(arrays_to_tensors(part) for part in tree)
    if isinstance(tree, np.ndarray):
        return {_ARRAY: torch.from_numpy(tree.copy())}
    return tree.item() if isinstance(tree, np.generic) else tree


def tensors_to_arrays(tree: Any) -> Any:
    """The inverse of `arrays_to_tensors`."""
    if isinstance(tree, dict):
        if tree.keys() == {_ARRAY}:
            return tree[_ARRAY].numpy().copy()
        return {key: tensors_to_arrays(part) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(tensors_to_arrays(part) for part in tree)
    return tree
