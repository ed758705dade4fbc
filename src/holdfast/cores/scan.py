"""A loop over the steps of a core, and the same loop through torch.compile, for cells of users that ask for it
(`Core.compiled_steps`). Where nothing can be compiled, the plain loop runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.state import State

Steps = Callable[[Any, Tensor, State, "Tensor | None"], tuple[Tensor, State]]


def run_steps(core: Any, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
    """x [T, B, I], resets [T, B] -> y [T, B, O] and the final state, step by step."""
    ys = []
    for t, x_t in enumerate(x.unbind(0)):
        y, state = core.step_unchecked(x_t, state, None if resets is None else resets[t])
        ys.append(y)
    return torch.stack(ys), state


def over_time(core: Any, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
    """`run_steps`, `core.compiled_steps` at a time compiled in training on a CPU. (On a GPU the whole update is a CUDA graph.)"""
    size = core.compiled_steps
    if not size or x.device.type != "cpu" or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return run_steps(core, x, state, resets)
    ys, T = [], x.shape[0]
    for t in range(0, T, size):
        run = (
            _compiled() if t + size <= T else run_steps
        )  # the rest, if T is no multiple, is not worth another compilation
        y, state = run(core, x[t : t + size], state, None if resets is None else resets[t : t + size])
        ys.append(y)
    return torch.cat(ys), state


@functools.cache
def _compiled() -> Steps:
    """`run_steps` through torch.compile, which keeps what it compiled on disk. After a failure the plain loop, and one warning."""
    fast, failed = torch.compile(run_steps, dynamic=False), False

    def run(core: Any, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        nonlocal failed
        if not failed:
            try:
                return fast(core, x, state, resets)
            except Exception as error:  # whatever a compiler says; an error of the step itself is raised again below
                result = run_steps(core, x, state, resets)
                failed = True
                reason = str(error).strip().partition("\n")[0]
                warnings.warn(f"the steps of {type(core).__name__} run uncompiled: {reason}", stacklevel=2)
                return result
        return run_steps(core, x, state, resets)

    return run
