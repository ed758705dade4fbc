"""Gradients of the states inside a sequence, computed only if somebody asks for them.

The fast kernels return the state after every step without its gradient, which almost nobody uses. `attach` gives the
states a backward that plays the sequence again, one differentiable step at a time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels.autocast import autocast_dtype
from holdfast.state import State, from_leaves, leaves, tree_map

Replay = Callable[[Tensor, State, Tensor | None], State]
"""(x, start, resets) -> the state after every step, leaves [T, B, ...], differentiable."""


def attach(states: State, module: nn.Module, replay: Replay, x: Tensor, start: State, resets: Tensor | None) -> State:
    """`states` [T, B, ...] as a function of x, start and the parameters of `module`."""
    weights = [p for p in module.parameters() if p.requires_grad]
    sources = [x, *leaves(start), *weights]
    if not torch.is_grad_enabled() or not any(source.requires_grad for source in sources):
        return states
    floats = [leaf for leaf in leaves(states) if leaf.is_floating_point()]
    call = _Call(replay, start, resets, len(floats), x.device)
    attached = iter(_Replayed.apply(call, *floats, *sources))  # type: ignore[no-untyped-call]
    return tree_map(lambda leaf: next(attached) if leaf.is_floating_point() else leaf, states)


class _Call:
    """What the backward needs besides tensors."""

    def __init__(self, replay: Replay, start: State, resets: Tensor | None, count: int, device: torch.device) -> None:
        self.replay, self.start, self.resets, self.count = replay, start, resets, count
        self.device, self.dtype = device, autocast_dtype(device)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        ctx.save_for_backward(*tensors[call.count :])
        ctx.set_materialize_grads(False)
        return tuple(state.view_as(state) for state in tensors[: call.count])

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError("states inside a sequence have no second derivative; take the steps one by one")
        call, sources = ctx.call, ctx.saved_tensors
        needed = ctx.needs_input_grad[1 + call.count :]
        x, *rest = sources
        count = len(leaves(call.start))
        with torch.enable_grad(), call.autocast():
            inputs = [t.detach().requires_grad_(n) if n else t.detach() for t, n in zip((x, *rest[:count]), needed)]
            states = call.replay(inputs[0], from_leaves(inputs[1:], like=call.start), call.resets)
        floats = [leaf for leaf in leaves(states) if leaf.is_floating_point()]
        pairs = [(s, g) for s, g in zip(floats, grads) if g is not None and s.requires_grad]
        wanted = [t for t, n in zip((*inputs, *rest[count:]), needed) if n]
        found: Any = iter(())
        if pairs:
            outputs, gradients = zip(*pairs)
            found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        results = [next(found, None) if n else None for n in needed]
        return (None, *[None] * call.count, *results)
