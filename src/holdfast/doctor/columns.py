"""What a policy returns, as rows of numbers `[N, K]` on which two legs can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.state import leaves


def columns(result: Any, rows: int) -> Tensor:
    """The deterministic numbers in a policy's result, one row per observation.

    Tensors with `rows` leading entries are kept, and the parameters of distributions. Integers (sampled actions) and
    tensors of another length (states) are left out.
    """
    found = [column for leaf in leaves(result) for column in _columns_of(leaf, rows)]
    if not found:
        raise TypeError(
            f"the doctor found no numbers with {rows} rows in what the policy returned ({describe(result)}); "
            "pass output=, a function that picks logits and value from it"
        )
    dtype = found[0].dtype
    return torch.cat([x.reshape(rows, -1).to(dtype) for x in found], dim=1)


def _columns_of(leaf: Any, rows: int) -> list[Tensor]:
    if isinstance(leaf, torch.distributions.Distribution):
        return [x.reshape(rows, -1) for x in parameters_of(leaf)]
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return []
    if leaf.dim() > 0 and leaf.shape[0] == rows:
        return [leaf]
    if leaf.dim() > 1 and leaf.shape[0] * leaf.shape[1] == rows:
        return [leaf.reshape(rows, -1)]
    return []


def parameters_of(distribution: Any) -> list[Tensor]:
    """The tensors that define a distribution."""
    inner = getattr(distribution, "base_dist", None)
    if inner is not None:
        return parameters_of(inner)
    if isinstance(distribution, torch.distributions.MixtureSameFamily):
        both = distribution.mixture_distribution, distribution.component_distribution
        return [x for part in both for x in parameters_of(part)]
    for name in ("distributions", "heads", "parts"):
        parts = getattr(distribution, name, None)
        if isinstance(parts, (list, tuple, dict)):
            return [x for part in leaves(parts) for x in parameters_of(part)]
    names = ("logits", "loc", "scale", "concentration", "concentration1", "concentration0")
    found = [getattr(distribution, name, None) for name in names]
    tensors = [x for x in found if isinstance(x, Tensor)]
    if tensors:
        return tensors
    wrapped = getattr(distribution, "distribution", None)
    if wrapped is not None:
        return parameters_of(wrapped)
    return [distribution.entropy()]


def describe(result: Any) -> str:
    """The structure of a result in short, for error messages."""
    if isinstance(result, Tensor):
        return f"a tensor {tuple(result.shape)}"
    if isinstance(result, (list, tuple)):
        return f"{type(result).__name__} of " + ", ".join(describe(item) for item in result)
    return type(result).__name__


def spread(distribution: Any, value: Tensor | None) -> Tensor:
    """`[N, K]`: log-probability of the mode, entropy, the mode itself if it is continuous, Q values and the value if there are any."""
    try:
        mode = distribution.mode
        parts = [distribution.log_prob(mode), distribution.entropy()]
    except (NotImplementedError, AttributeError):  # it has no mode, or no entropy but one of random samples
        mode, parts = None, parameters_of(distribution)
    if hasattr(distribution, "q"):  # of a greedy policy the two are 0
        parts.append(distribution.q)
    floats = [x for x in leaves(mode) if isinstance(x, Tensor) and x.is_floating_point()]
    parts = [*(x.reshape(x.shape[0], -1) for x in floats), *parts]
    if value is not None:
        parts.append(value)
    rows = parts[0].shape[0]
    return torch.cat([x.reshape(rows, -1).to(parts[0].dtype) for x in parts], dim=1)
