"""NaN and infinity in what a `Runner` sees and keeps: which rows, and what they are replaced by. Arrays or tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.checks import values_are_readable
from holdfast.policies.base import to_numpy
from holdfast.state import leaves, tree_map

Flags = np.ndarray[Any, Any]  # [B] bool

POLICIES = ("raise", "skip", "reset")


def bad_rows(tree: Any, may_wait: bool) -> Flags | None:
    """The rows [B, ...] that hold NaN or infinity; None if there are none. may_wait: for a GPU."""
    bad: Flags | None = None
    for leaf in _suspects(tree, may_wait):
        finite: Flags = np.isfinite(leaf)
        if not finite.all():
            rows = np.asarray(~finite.reshape(len(finite), -1).all(1))
            bad = rows if bad is None else bad | rows
    return bad


def impossible(logits: Any, may_wait: bool) -> bool:
    """Whether logits hold NaN or +infinity: no action follows from them. -infinity is an action that a mask forbids.

    None, of a distribution without logits, is fine.
    """
    return any(not float(leaf.max()) < np.inf for leaf in _suspects(logits, may_wait))  # the largest is NaN if one is


def _suspects(tree: Any, may_wait: bool) -> Iterator[np.ndarray[Any, Any]]:
    """The floating-point arrays that may hold NaN or infinity. A look at each number would take several times as long."""
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            if not leaf.is_floating_point() or not (may_wait or values_are_readable(leaf)):
                continue
            leaf = to_numpy(leaf)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            flat = leaf.reshape(-1)
            squares = float(flat.dot(flat))  # one pass, a microsecond; not finite also if it is too large
            if squares - squares != 0.0:
                yield leaf


def zeroed(tree: Any) -> Any:
    """NaN and infinity as 0."""

    def clean(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.nan_to_num(leaf, 0.0, 0.0, 0.0) if leaf.is_floating_point() else leaf
        is_float = isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"
        return np.nan_to_num(leaf, nan=0.0, posinf=0.0, neginf=0.0) if is_float else leaf

    return tree_map(clean, tree)


def where(rows: Flags, one: Any, other: Any) -> Any:
    """Row b of `one` where rows[b], of `other` elsewhere."""

    def choose(a: Any, b: Any) -> Any:
        mask = rows.reshape(-1, *(1,) * (a.ndim - 1))
        return (
            torch.where(torch.as_tensor(mask, device=a.device), a, b) if isinstance(a, Tensor) else np.where(mask, a, b)
        )

    return tree_map(choose, one, other)


def flagged(flags: Any, rows: Flags, device: torch.device) -> Any:
    """Reset flags, and True in `rows`. None, no reset, is said only by a policy in torch; it gets a tensor on `device`."""
    if flags is None:
        return torch.as_tensor(rows, device=device)
    return flags | torch.as_tensor(rows, device=flags.device) if isinstance(flags, Tensor) else flags | rows


def as_rows(flags: Any, batch: int) -> Flags:
    """Reset flags on the host."""
    if flags is None:
        return np.zeros(batch, bool)
    return flags.cpu().numpy() if isinstance(flags, Tensor) else np.asarray(flags)
