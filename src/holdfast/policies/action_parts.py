"""Dict and Tuple action spaces: their parts, and one mask for all of them.

An action of such a space is a dict or a tuple of arrays or tensors, nested as the space is; whoever keeps actions treats them as
a tree. A mask is one tensor inside [..., n + m + ...]: the masks of the parts side by side, in the order of the space.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from holdfast.state import leaves, tree_map

Tree = Any


def has_parts(space: Any) -> bool:
    return isinstance(space, (spaces.Dict, spaces.Tuple))


def tree_of(space: Any) -> Tree:
    """The spaces of the parts, nested as actions are; a space of another kind is its own only part."""
    if isinstance(space, spaces.Dict):
        return {key: tree_of(part) for key, part in space.items()}
    return tuple(map(tree_of, space)) if isinstance(space, spaces.Tuple) else space


def part_spaces(space: Any) -> list[spaces.Space[Any]]:
    """The spaces of the parts, one after the other."""
    return leaves(tree_of(space))


def boxes_of(space: Any) -> list[spaces.Box]:
    """The parts that are a Box."""
    return [part for part in part_spaces(space) if isinstance(part, spaces.Box)]


def num_outputs(space: spaces.Space[Any]) -> int:
    """How many numbers the last layer of an actor gives for an action space."""
    if has_parts(space):
        return sum(map(num_outputs, part_spaces(space)))
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim != 1 or space.start.any():
            raise ValueError(f"MultiDiscrete actions must be one-dimensional and start at 0, got {space}")
        return int(space.nvec.sum())
    if isinstance(space, spaces.MultiBinary):
        if len(space.shape) != 1:
            raise ValueError(f"MultiBinary actions must be one-dimensional, got {space}")
        return int(space.shape[0])
    if isinstance(space, spaces.Box):
        return int(torch.Size(space.shape).numel())
    raise ValueError(
        f"no action head for {space}; Discrete, MultiDiscrete, MultiBinary and Box are supported, and Dict and Tuple of these"
    )


def first_action(space: Any) -> int:
    """What fills the previous action of a space without parts at the first step of an episode."""
    return int(space.start) if isinstance(space, spaces.Discrete) else 0


# --- masks ------------------------------------------------------------------------------------------------------------


def mask_sizes(space: Any) -> Tree:
    """How many choices a mask of each part names; 0 where it takes none."""
    choices = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    return tree_map(lambda part: num_outputs(part) if isinstance(part, choices) else 0, tree_of(space))


def joined_mask(mask: Any, sizes: Tree, device: torch.device | str = "cpu") -> Tensor | None:
    """One bool tensor [..., n + m + ...] of a dict or tuple of masks, nested as `sizes`; None: all is allowed, there or everywhere.

    A list or an array of objects holds one mask per row. What gymnasium's vector environments make of a dict in `info` is read too:
    `_key` says in which rows `key` is a mask. An array is taken for joined.
    """
    if mask is None or isinstance(mask, Tensor):
        return mask
    if isinstance(sizes, int) and isinstance(mask, tuple):  # one per head, as gymnasium's MultiDiscrete.sample takes
        mask = np.concatenate([np.asarray(head) for head in mask], -1)
    elif (
        isinstance(sizes, int)
        and isinstance(mask, list)
        and not any(isinstance(row, (tuple, type(None))) for row in mask)
    ):
        mask = np.asarray(mask)
    if isinstance(mask, list) or (isinstance(mask, np.ndarray) and mask.dtype == object):
        rows = [joined_mask(row, sizes, device) for row in mask]
        known = next((row for row in rows if row is not None), None)
        return None if known is None else torch.stack([torch.ones_like(known) if row is None else row for row in rows])
    if isinstance(mask, np.ndarray):
        return torch.as_tensor(mask.astype(bool), device=device)
    keys = _matching_keys(mask, sizes)
    parts = [_part_mask(mask, key, sizes[key], device) for key in keys]
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    for i, (key, part) in enumerate(zip(keys, parts)):
        shape = (*known.shape[:-1], sum(leaves(sizes[key])))
        parts[i] = known.new_ones(shape) if part is None else part
        if parts[i].shape != shape:  # type: ignore[union-attr]
            hint = "" if shape[-1] else "; leave it out, a Box takes no mask"
            raise ValueError(f"the action mask of {key!r} has shape {tuple(part.shape)}, expected {shape}{hint}")  # type: ignore[union-attr]
    return torch.cat(parts, -1)  # type: ignore[arg-type]


def _part_mask(mask: Any, key: Any, sizes: Tree, device: torch.device | str) -> Tensor | None:
    """The mask of one part, [..., n]; None: all is allowed."""
    if isinstance(mask, tuple):
        joined, given = joined_mask(mask[key], sizes, device), None
    else:
        joined, given = joined_mask(mask.get(key), sizes, device), mask.get(f"_{key}")
    if joined is None or given is None:
        return None if joined is None else joined.bool()
    return joined.bool() | ~torch.as_tensor(given, device=device).unsqueeze(-1)


def _matching_keys(mask: Any, sizes: Tree) -> list[Any]:
    """The keys or numbers of the parts, if the mask is nested as they are."""
    if isinstance(sizes, dict) and isinstance(mask, dict):
        known = {*sizes, *(f"_{key}" for key in sizes)}
        if all(key in known for key in mask):
            return list(sizes)
    elif isinstance(sizes, tuple) and isinstance(mask, tuple) and len(mask) == len(sizes):
        return list(range(len(sizes)))
    got = f" of {list(mask)}" if isinstance(mask, dict) else f" of {len(mask)}" if isinstance(mask, tuple) else ""
    form = tree_map(lambda n: [n] if n else None, sizes)
    raise ValueError(
        f"the action mask is a {type(mask).__name__}{got}, expected {form}: so many flags for each part (True = allowed), or None "
        "where all is allowed"
    )


def with_batch(mask: Any) -> Any:
    """The mask of one observation, or a tree of them, with a batch dimension."""
    if isinstance(mask, dict):
        return {key: with_batch(part) for key, part in mask.items()}
    if isinstance(mask, (list, tuple)) and any(
        m is None or isinstance(m, dict) or np.ndim(m) for m in mask
    ):  # one per head
        return type(mask)(map(with_batch, mask))
    return mask if mask is None else mask[None] if isinstance(mask, Tensor) else np.asarray(mask)[None]


def split_mask(mask: Tensor | None, sizes: Tree) -> list[Tensor | None]:
    """The mask of each part; None for those that take none."""
    counts = leaves(sizes)
    if mask is None:
        return [None] * len(counts)
    if not isinstance(mask, Tensor) or mask.shape[-1] != sum(counts):
        got = f"has shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise ValueError(f"the action mask {got}, expected [N, {sum(counts)}]: those of all parts side by side")
    return [part if count else None for part, count in zip(mask.split(counts, -1), counts)]
