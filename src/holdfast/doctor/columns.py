"""Turns whatever a policy returns into rows of numbers `[N, K]` that two legs can be compared on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def columns(result: Any, rows: int) -> Tensor:
    """The deterministic numbers in a policy's result, one row per observation.

    Tensors with `rows` leading entries are kept, distributions give their parameters, whole numbers (sampled
    actions) and tensors of another length (states) are left out.
    """
    found: list[Tensor] = []
    _collect(result, rows, found)
    if not found:
        raise TypeError(
            f"the doctor found no numbers with {rows} rows in what the policy returned ({describe(result)}); "
            "pass output=, a function that picks logits and value from it"
        )
    dtype = found[0].dtype
    return torch.cat([x.reshape(rows, -1).to(dtype) for x in found], dim=1)


def _collect(result: Any, rows: int, found: list[Tensor]) -> None:
    if isinstance(result, Tensor):
        if result.is_floating_point() and result.dim() > 0 and result.shape[0] == rows:
            found.append(result)
        elif result.is_floating_point() and result.dim() > 1 and result.shape[0] * result.shape[1] == rows:
            found.append(result.reshape(rows, -1))
    elif isinstance(result, torch.distributions.Distribution):
        found.extend(x.reshape(rows, -1) for x in parameters_of(result))
    elif isinstance(result, dict):
        for item in result.values():
            _collect(item, rows, found)
    elif isinstance(result, (list, tuple)):
        for item in result:
            _collect(item, rows, found)


def parameters_of(distribution: Any) -> list[Tensor]:
    """The tensors that say which distribution this is."""
    inner = getattr(distribution, "base_dist", None)
    if inner is not None:
        return parameters_of(inner)
    for name in ("distributions", "heads"):
        parts = getattr(distribution, name, None)
        if isinstance(parts, (list, tuple)):
            return [x for part in parts for x in parameters_of(part)]
    found = [getattr(distribution, name, None) for name in ("logits", "loc", "scale", "concentration")]
    tensors = [x for x in found if isinstance(x, Tensor)]
    if tensors:
        return tensors
    wrapped = getattr(distribution, "distribution", None)
    if wrapped is not None:
        return parameters_of(wrapped)
    return [distribution.entropy()]


def describe(result: Any) -> str:
    """A short word for a result's structure, for error messages."""
    if isinstance(result, Tensor):
        return f"a tensor {tuple(result.shape)}"
    if isinstance(result, (list, tuple)):
        return f"{type(result).__name__} of " + ", ".join(describe(item) for item in result)
    return type(result).__name__


def spread(distribution: Any, value: Tensor | None) -> Tensor:
    """`[N, K]` of a distribution (its mode's score, its entropy, its mode where that is continuous) and the value."""
    mode = distribution.mode
    parts = [distribution.log_prob(mode), distribution.entropy()]
    if isinstance(mode, Tensor) and mode.is_floating_point():
        parts = [mode.reshape(mode.shape[0], -1), *parts]
    if value is not None:
        parts.append(value)
    rows = parts[0].shape[0]
    return torch.cat([x.reshape(rows, -1).to(parts[0].dtype) for x in parts], dim=1)
