"""Checks of what comes in, and the debug switch.

Structure (type, dtype, rank, shape, device) is always checked and always raises. Values are checked where that costs
nothing: on the host and outside a compiler, or anywhere after `hf.debug(True)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_debug = False
_env_ids: Tensor | None = None  # of the rows now in a core, while debugging; None: the rows are numbered


def debug(enabled: bool = True) -> None:
    """Check values everywhere (also on a GPU, where it waits for the device) and trace NaN to environment and step."""
    global _debug
    _debug = bool(enabled)


def is_debug() -> bool:
    return _debug and not torch.compiler.is_compiling()


def values_are_readable(tensor: Tensor) -> bool:
    """Whether the numbers in `tensor` may be looked at: they lie on the host, or the user asked for debugging."""
    return not torch.compiler.is_compiling() and (_debug or tensor.device.type == "cpu")


def check_resets(resets: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """`resets` is a bool tensor of exactly `shape`."""
    if not isinstance(resets, Tensor):
        raise TypeError(
            f"resets is a {type(resets).__name__}, expected a bool tensor of shape {shape}; "
            "use torch.as_tensor(flags, dtype=torch.bool)"
        )
    if resets.dtype != torch.bool:
        raise TypeError(f"resets has dtype {resets.dtype}, expected torch.bool; use flags.bool()")
    if tuple(resets.shape) != tuple(shape):
        raise ValueError(
            f"resets has shape {tuple(resets.shape)}, expected {tuple(shape)}: one flag per step and environment, "
            "True where the observation is the first of an episode"
        )
    if resets.device != device:
        raise ValueError(
            f"resets is on {resets.device}, the input on {device}; move it with resets.to({str(device)!r})"
        )


@contextmanager
def rows_are(env_ids: Tensor | None) -> Iterator[None]:
    """Inside, `trace_nonfinite` names environments by these ids. Debug mode only."""
    global _env_ids
    before, _env_ids = _env_ids, env_ids
    try:
        yield
    finally:
        _env_ids = before


def trace_nonfinite(y: Tensor, x: Tensor) -> None:
    """Raise if `y` [T, B, O] or [B, O] holds NaN or Inf, naming the first step and environment. Debug mode only."""
    bad = ~torch.isfinite(y.detach()).flatten(start_dim=y.dim() - 1).all(-1)  # [T, B] or [B]
    if not bool(bad.any()):
        return
    where = bad.nonzero()[0].tolist()
    row = where[-1]
    env = row if _env_ids is None else int(_env_ids[row])
    step = f"step t={where[0]}, " if len(where) == 2 else ""
    x_bad = not bool(torch.isfinite(x.detach()[tuple(where)]).all())
    source = (
        "its input is already non-finite there" if x_bad else "its input there is finite: look at state and weights"
    )
    raise FloatingPointError(
        f"non-finite core output at {step}environment {env} (first of {int(bad.sum())} bad rows); {source}"
    )
