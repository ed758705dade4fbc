"""A state is a pytree (dicts, tuples, lists) of batch-first tensors. This file holds its operations.

Every leaf is [B, ...]. A tree without tensors (a core that remembers nothing) is a valid state. The walkers at the top
work on any tree (observations, masks, row shapes). What a state means is known only to the core that made it.

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
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class RowShape:
    """One environment's row of a leaf: the leaf has shape [B, *shape].

    dtype: None follows the module. A leaf may fix its own (int32 counters, float32 sums in a bfloat16 module).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


# --- walking through trees --------------------------------------------------------------------------------------------


def tree_map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `fn` to the leaves of one or several trees of the same structure. None is a leaf."""
    if isinstance(tree, dict):
        return {k: tree_map(fn, v, *[o[k] for o in others]) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [tree_map(fn, v, *[o[i] for o in others]) for i, v in enumerate(tree)]
        # A NamedTuple takes its parts one by one.
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return fn(tree, *others)


def map_tensors(fn: Callable[..., Any], tree: Any) -> Any:
    """Apply `fn` to the tensors of a tree. Other leaves stay as they are."""
    return tree_map(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves in a fixed order."""
    if isinstance(tree, dict):
        return [leaf for v in tree.values() for leaf in leaves(v)]
    if isinstance(tree, (tuple, list)):
        return [leaf for v in tree for leaf in leaves(v)]
    return [tree]


def tensors_in(tree: Any) -> list[Tensor]:
    """The leaves that are tensors, in a fixed order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def paths(tree: Any, prefix: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """(path, leaf) for every leaf, in the order of `leaves`: `{"actor": (t,)}` gives `[(("actor", 0), t)]`."""
    if isinstance(tree, dict):
        return [pair for k, v in tree.items() for pair in paths(v, (*prefix, k))]
    if isinstance(tree, (tuple, list)):
        return [pair for i, v in enumerate(tree) for pair in paths(v, (*prefix, i))]
    return [(prefix, tree)]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by path: `{"actor": {"h": t}}` gives `{"actor.h": t}`."""
    return {".".join(map(str, path)): leaf for path, leaf in paths(tree)}


def from_leaves(leaves: list[Any], like: Any) -> Any:
    """The tree with the structure of `like` and these leaves, in the order of `leaves(like)`."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), like)


# --- states -----------------------------------------------------------------------------------------------------------


def detach(state: State) -> State:
    """The same numbers without a graph. Shares storage."""
    return tree_map(lambda x: x.detach(), state)


def without_graph(state: State) -> State:
    """Detached, and usable in backward even if it was made under `torch.inference_mode`."""
    if not torch.compiler.is_compiling() and any(leaf.is_inference() for leaf in leaves(state)):
        with torch.inference_mode(False):
            return clone(state)
    return detach(state)


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


def convert(state: Any, rows: State, dtype: torch.dtype, device: torch.device) -> State:
    """Arrays or tensors as a state: on `device`, each leaf in the dtype that its `RowShape` fixes, else in `dtype`."""
    return tree_map(lambda row, x: torch.as_tensor(x, dtype=row.dtype or dtype, device=device), rows, state)


def ordered_leaves(state: State, rows: State) -> list[Tensor]:
    """The leaves in the order of `leaves(rows)`; a state may hold its keys in another order."""
    return leaves(tree_map(lambda row, leaf: leaf, rows, state))


def batch_size(state: State) -> int | None:
    """B, or None for a state without tensors."""
    for leaf in leaves(state):
        if isinstance(leaf, Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return None


def rows_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A [B] mask viewed so that it broadcasts over a [B, ...] leaf."""
    return mask.view(mask.shape[0], *(1,) * (like.dim() - 1))


def flat_rows(leaf: Tensor) -> Tensor:
    """[B, ...] -> [B, n]; [B] -> [B, 1]."""
    return leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1)


# --- checking against row shapes --------------------------------------------------------------------------------------


def mismatch(state: Any, rows: State, batch: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What differs between `state` and a tree of `RowShape`s (keys, shapes, dtype, device), or None."""

    def compare(leaf: Any, row: RowShape) -> str | None:
        return _leaf_mismatch(leaf, (batch, *row.shape), row.dtype or dtype, device)

    return _first_mismatch(state, rows, compare)


def structure_mismatch(state: Any, rows: State) -> str | None:
    """What differs in keys and lengths alone, or None; leaves may be anything."""
    return _first_mismatch(state, rows, lambda leaf, row: None)


def _first_mismatch(state: Any, rows: State, compare: Callable[[Any, RowShape], str | None]) -> str | None:
    if isinstance(rows, RowShape):
        return compare(state, rows)
    what = _container_mismatch(state, rows)
    if what:
        return what
    for key in rows if isinstance(rows, dict) else range(len(rows)):
        what = _first_mismatch(state[key], rows[key], compare)
        if what:
            return f"state[{key!r}]: {what}"
    return None


def _container_mismatch(state: Any, rows: State) -> str | None:
    if isinstance(rows, dict):
        if isinstance(state, dict) and state.keys() == rows.keys():
            return None
        got = f"keys {sorted(map(str, state))}" if isinstance(state, dict) else f"a {type(state).__name__}"
        return f"{got}, expected a dict with keys {sorted(map(str, rows))}"
    if isinstance(state, (tuple, list)) and len(state) == len(rows):
        return None
    got = f"{len(state)} parts" if isinstance(state, (tuple, list)) else f"a {type(state).__name__}"
    return f"{got}, expected a tuple of {len(rows)} states"


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
