"""What an evaluation records, step by step: observations, states, values, actions, distributions. For plots and probes of a memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.policies.heads import Factored
from holdfast.state import map_tensors, named_leaves, tree_map

RECORDED = ("obs", "state", "value", "action", "dist")
"""What may be asked for. `state` is the one after the step."""


class StepRecord:
    """Steps of all environments, on the host."""

    def __init__(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if name not in RECORDED]
        if isinstance(names, str) or unknown:
            raise ValueError(f"record={names!r} must be a tuple of {', '.join(RECORDED)}")
        self.names = tuple(names)
        self._steps: list[dict[str, Any]] = []

    def add(self, **parts: Any) -> None:
        """A step: tensors or trees of them, each [B, ...]; those that were not asked for are left out."""
        kept = {name: part for name, part in parts.items() if name in self.names or name not in RECORDED}
        if "dist" in kept:
            kept["dist"] = numbers_of(kept["dist"])
        if "value" in kept and kept["value"] is None:
            raise ValueError("this policy has no critic, so no value can be recorded; leave 'value' out of record=")
        # A copy: environments and memories may write into their tensors later.
        self._steps.append(map_tensors(lambda x: x.detach().to("cpu", copy=True), kept))

    def arrays(self, counted: np.ndarray) -> dict[str, np.ndarray]:
        """[T, B, ...] by name; parts of a tree as "state.h". counted [T, B]: steps of the episodes in the result."""
        rows = [named_leaves(step) for step in self._steps]
        found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {name: (x.float() if x.dtype == torch.bfloat16 else x).numpy() for name, x in found.items()} | {
            "counted": counted
        }


def numbers_of(dist: Any) -> Any:
    """What a distribution is made from: its `params`, ours or a torch distribution's parameters by name."""
    if isinstance(dist, Factored):
        return tree_map(numbers_of, dist.parts)
    if isinstance(getattr(dist, "params", None), Tensor):
        return dist.params
    inner = getattr(dist, "base_dist", dist)
    known = list(getattr(inner, "arg_constraints", ("logits", "mean", "log_std")))
    return {name: getattr(inner, name) for name in [name for name in known if name in vars(inner)] or known}
