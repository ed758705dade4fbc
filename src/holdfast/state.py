"""A state is a pytree (dicts, tuples, lists) of batch-first tensors. These are its few operations, nothing more.

Every leaf is [B, ...]. A tree without tensors (a core that remembers nothing) is a valid state.

>>> import torch
>>> s = {"h": torch.zeros(3, 2), "c": torch.ones(3, 2)}
>>> select(s, torch.tensor([2, 0]))["c"].shape
torch.Size([2, 2])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = Any  # a pytree of tensors; opaque to everybody but the core that made it


@dataclass(frozen=True)
class RowShape:
    """The shape of one environment's row of a leaf: a leaf of shape [B, *shape]."""

    shape: tuple[int, ...]


def tree_map(fn: Callable[..., Any], tree: State, *others: State) -> State:
    """Apply `fn` to the leaves of one or several trees of the same structure."""
    if isinstance(tree, dict):
        return {k: tree_map(fn, v, *[o[k] for o in others]) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [tree_map(fn, v, *[o[i] for o in others]) for i, v in enumerate(tree)]
        return (
            type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        )  # a NamedTuple takes them one by one
    return fn(tree, *others)


def leaves(tree: State) -> list[Any]:
    """The leaves in a fixed order."""
    if isinstance(tree, dict):
        return [leaf for v in tree.values() for leaf in leaves(v)]
    if isinstance(tree, (tuple, list)):
        return [leaf for v in tree for leaf in leaves(v)]
    return [tree]


def named_leaves(tree: State, prefix: str = "") -> dict[str, Any]:
    """The leaves by path: `{"actor": {"h": t}}` gives `{"actor.h": t}`."""
    if isinstance(tree, dict):
        items = [(str(k), v) for k, v in tree.items()]
    elif isinstance(tree, (tuple, list)):
        items = [(str(i), v) for i, v in enumerate(tree)]
    else:
        return {prefix: tree}
    out: dict[str, Any] = {}
    for k, v in items:
        out.update(named_leaves(v, f"{prefix}.{k}" if prefix else k))
    return out


def detach(state: State) -> State:
    """The same numbers without a graph. Shares storage."""
    return tree_map(lambda x: x.detach(), state)


def clone(state: State) -> State:
    """A copy that shares nothing."""
    return tree_map(lambda x: x.clone(), state)


def select(state: State, rows: Tensor) -> State:
    """The given rows, in the given order: a copy."""
    return tree_map(lambda x: x.index_select(0, rows), state)


def where(mask: Tensor, state: State, other: State) -> State:
    """Row b of `state` where mask[b], of `other` elsewhere. Selects, so a NaN in the unused one does not matter."""
    return tree_map(lambda a, b: torch.where(rows_mask(mask, a), a, b), state, other)


def to(state: State, *args: Any, **kwargs: Any) -> State:
    """`Tensor.to` on every leaf."""
    return tree_map(lambda x: x.to(*args, **kwargs), state)


def batch_size(state: State) -> int | None:
    """B, or None for a state without tensors."""
    all_leaves = leaves(state)
    return int(all_leaves[0].shape[0]) if all_leaves else None


def rows_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A [B] mask viewed so that it broadcasts over a [B, ...] leaf."""
    return mask.view(mask.shape[0], *(1,) * (like.dim() - 1))


def mismatch(state: State, rows: State, batch: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What differs between `state` and a tree of `RowShape`s (keys, shapes, dtype, device), or None."""
    if isinstance(rows, RowShape):
        return _leaf_mismatch(state, (batch, *rows.shape), dtype, device)
    if isinstance(rows, dict):
        if not isinstance(state, dict) or state.keys() != rows.keys():
            got = f"keys {sorted(map(str, state))}" if isinstance(state, dict) else f"a {type(state).__name__}"
            return f"{got}, expected a dict with keys {sorted(map(str, rows))}"
        pairs = [(k, state[k], rows[k]) for k in rows]
    else:
        if not isinstance(state, (tuple, list)) or len(state) != len(rows):
            got = f"{len(state)} parts" if isinstance(state, (tuple, list)) else f"a {type(state).__name__}"
            return f"{got}, expected a tuple of {len(rows)} states"
        pairs = [(i, s, e) for i, (s, e) in enumerate(zip(state, rows))]
    for key, s, e in pairs:
        inner = mismatch(s, e, batch, dtype, device)
        if inner:
            return f"state[{key!r}]: {inner}"
    return None


def _leaf_mismatch(leaf: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str | None:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}, expected a tensor of shape {shape}"
    if leaf.shape != shape:
        return f"shape {tuple(leaf.shape)}, expected {shape}"
    if leaf.dtype != dtype:
        return f"dtype {leaf.dtype}, expected {dtype}"
    if leaf.device != device:
        return f"device {leaf.device}, expected {device}"
    return None
