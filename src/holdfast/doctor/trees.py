"""The tensors of nested dicts, tuples and lists, when other leaves may be among them. The walker is `holdfast.state`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from holdfast.state import leaves, tree_map


def map_tensors(function: Callable[..., Any], tree: Any) -> Any:
    """Apply `function` to the tensors. Other leaves stay as they are."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors, in a fixed order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
