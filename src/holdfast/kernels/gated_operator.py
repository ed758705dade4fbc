"""A gated layer as a differentiable operator, from a forward and a backward. `reference/lstm.py` and `gru.py` specify it.

A GRU is a call with c0 = None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from holdfast.kernels import operators
from holdfast.kernels.operands import Gradients, Needed, Resets, Weights


class Outputs(NamedTuple):
    """What a forward computes. Only for a backward, or if it is asked for: the cells of an LSTM, and what else is kept."""

    y: Tensor  # [T, B, H]
    h_n: Tensor  # [B, H]
    c_n: Tensor | None  # None for a GRU
    cells: Tensor | None = None  # c after every step, [T, B, H or more]
    kept: tuple[Tensor, ...] = ()  # at most three


class Kept(NamedTuple):
    """What a backward needs from its forward."""

    x: Tensor
    h0: Tensor
    c0: Tensor | None
    resets: Resets
    weights: Weights  # without biases
    y: Tensor
    cells: Tensor | None
    kept: tuple[Tensor, ...]


Forward = Callable[[Tensor, Tensor, Tensor | None, Resets, Weights, bool], Outputs]
Backward = Callable[[Tensor | None, Tensor | None, Tensor | None, Kept, Needed], Gradients]
Shapes = Callable[[Tensor, Tensor, Tensor, bool, bool], Outputs]
Layer = Callable[..., tuple[Tensor, Tensor, Any, Any]]
_INPUTS = ("x", "h0", "c0?", "mask?", "reset_h?", "reset_c?", "w_ih", "w_hh", "b_ih?", "b_hh?")
_KEPT = 3  # tensors that an operator has room for


def new_gradients(kept: Kept, needed: Needed) -> Gradients:
    """Contiguous tensors to be filled."""
    x, h0, _, _, (w_ih, w_hh, *_), *_ = kept
    rows, H = w_hh.shape
    state, start, bias = (h0, h0.shape), (h0, (H,)), (w_ih, (rows,))
    shapes = ((x, x.shape), state, state, start, start, (w_ih, w_ih.shape), (w_hh, w_hh.shape), bias, bias)
    return Gradients(*[like.new_empty(shape) if need else None for (like, shape), need in zip(shapes, needed)])


def make_operator(name: str, run_forward: Forward, run_backward: Backward, new_outputs: Shapes) -> Layer:
    """A layer as a function (x, h0, c0, resets, weights, keep=False) -> y, h_n, c_n, cells. Registers holdfast::{name}.

    run_forward(x, h0, c0, resets, weights, keep) and run_backward(dy, dh_n, dc_n, kept, needed) know nothing of autograd. A
    gradient that is not needed may come anyway. new_outputs(x, h0, w_hh, is_lstm, keep): empty tensors like a forward's.
    """

    def run(*arguments: Any) -> Sequence[Any]:
        x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, detach, keep = arguments
        resets, weights = Resets(mask, reset_h, reset_c, detach), Weights(w_ih, w_hh, b_ih, b_hh)
        return _flat(run_forward(x, h0, c0, resets, weights, keep))

    def differentiate(d: Any, inputs: Any, outputs: Any, options: Any, needed: Sequence[bool]) -> Sequence[Any]:
        (x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, *_), (y, _, _, cells, *kept) = inputs, outputs
        resets = Resets(mask, reset_h, reset_c, options[0])
        found = Kept(x, h0, c0, resets, Weights(w_ih, w_hh), y, cells, tuple(kept))
        dy, dh_n, dc_n = d
        gradients = run_backward(dy, dh_n, dc_n, found, Needed(*(*needed[:3], *needed[4:])))
        return *gradients[:3], None, *gradients[3:]

    def empty(*arguments: Any) -> Sequence[Any]:
        x, h0, c0, *_, w_hh, _, _, _, keep = arguments
        return _flat(new_outputs(x, h0, w_hh, c0 is not None, keep))

    call = operators.make_operator(
        name, _INPUTS, ("bool detach", "bool keep"), run, differentiate, empty, outputs=4 + _KEPT, differentiable=3
    )

    def layer(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, keep: bool = False) -> Any:
        mask, reset_h, reset_c, detach = resets
        if mask is None or detach:
            reset_h = reset_c = None
        tensors = (x, h0, c0, mask, reset_h, reset_c, *weights)
        return call(*tensors, detach, keep or operators.needs_gradients(tensors))[:4]

    return layer


def _flat(outputs: Outputs) -> Sequence[Any]:
    *first, kept = outputs
    return *first, *kept, *[None] * (_KEPT - len(kept))
