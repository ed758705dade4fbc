"""Makes a differentiable operator of a gated layer's forward and backward. `reference/lstm.py` and `gru.py` specify it.

Autograd exists twice: as an operator that torch.compile sees as one node, and as an autograd function, which costs eager mode
0.1 ms less per call. An operator returns tensors only, so an absent one is empty there. A GRU is a call with c0 = None.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.library import custom_op

from holdfast.checks import is_without_numbers
from holdfast.kernels.operands import Gradients, Needed, Resets, Weights, refuse_second_derivative


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

    @custom_op(f"holdfast::{name}", mutates_args=())
    def forward(
        x: Tensor,
        h0: Tensor,
        c0: Optional[Tensor],
        mask: Optional[Tensor],
        reset_h: Optional[Tensor],
        reset_c: Optional[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Optional[Tensor],
        b_hh: Optional[Tensor],
        detach_at_reset: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        resets, weights = Resets(mask, reset_h, reset_c, detach_at_reset), Weights(w_ih, w_hh, b_ih, b_hh)
        return _flat(run_forward(x, h0, c0, resets, weights, keep))

    @forward.register_fake
    def _(x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, detach_at_reset, keep):
        return _flat(new_outputs(x, h0, w_hh, c0 is not None, keep))

    @custom_op(f"holdfast::{name}_backward", mutates_args=())
    def backward(
        dy: Optional[Tensor],
        dh_n: Optional[Tensor],
        dc_n: Optional[Tensor],
        x: Tensor,
        h0: Tensor,
        c0: Optional[Tensor],
        mask: Optional[Tensor],
        reset_h: Optional[Tensor],
        reset_c: Optional[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        y: Tensor,
        cells: Tensor,
        kept0: Tensor,
        kept1: Tensor,
        kept2: Tensor,
        detach_at_reset: bool,
        needed: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        saved = (x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, y, cells, kept0, kept1, kept2)
        kept = _kept(saved, detach_at_reset)
        found = run_backward(dy, dh_n, dc_n, kept, Needed(*needed))
        dtypes = (x.dtype, *[h0.dtype] * 4, *[w_ih.dtype] * 4)
        empty = kept.x.new_empty
        return tuple([
            g.to(dtype) if g is not None and need else empty(0) for g, need, dtype in zip(found, needed, dtypes)
        ])  # type: ignore[return-value]  # fmt: skip

    @backward.register_fake
    def _(
        dy, dh_n, dc_n, x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, y, cells, kept0, kept1, kept2, detach_at_reset, needed
    ):  # fmt: skip
        kept = Kept(x, h0, c0, Resets(), Weights(w_ih, w_hh), y, cells, ())
        return tuple([x.new_empty(0) if g is None else g for g in new_gradients(kept, Needed(*needed))])

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        y, _, _, *kept = output
        ctx.save_for_backward(*inputs[:8], y, *kept)
        ctx.detach_at_reset = inputs[10]
        ctx.set_materialize_grads(False)

    def gradients_of_operator(ctx: Any, dy: Any, dh_n: Any, dc_n: Any, *_: Any) -> tuple[Any, ...]:
        if dy is None and dh_n is None and dc_n is None:
            return (None,) * 12
        flags = ctx.needs_input_grad
        found = backward(dy, dh_n, dc_n, *ctx.saved_tensors, ctx.detach_at_reset, list(Needed.of_inputs(flags)))
        return Gradients(*found).of_inputs(flags)

    forward.register_autograd(gradients_of_operator, setup_context=save)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
            x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, detach, keep = inputs
            resets, weights = Resets(mask, reset_h, reset_c, detach), Weights(w_ih, w_hh, b_ih, b_hh)
            y, h_n, c_n, cells, kept = run_forward(x, h0, c0, resets, weights, keep)
            save(ctx, inputs, (y, h_n, c_n, cells, *kept))
            if cells is not None:
                ctx.mark_non_differentiable(cells)
            return y, h_n, c_n, cells

        @staticmethod
        def backward(ctx: Any, dy: Any, dh_n: Any, dc_n: Any, _: Any) -> tuple[Any, ...]:
            refuse_second_derivative()
            if dy is None and dh_n is None and dc_n is None:
                return (None,) * 12
            flags, kept = ctx.needs_input_grad, _kept(ctx.saved_tensors, ctx.detach_at_reset)
            return run_backward(dy, dh_n, dc_n, kept, Needed.of_inputs(flags)).of_inputs(flags)

    # What Function.apply does when no functorch transform is active; its checks cost as much as a launch on a GPU.
    apply = super(torch.autograd.Function, Eager).apply

    def layer(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, keep: bool = False) -> Any:
        mask, reset_h, reset_c, detach = resets
        if mask is None or detach:
            reset_h = reset_c = None
        tensors = (x, h0, c0, mask, reset_h, reset_c, *weights)
        grad = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
        if torch.compiler.is_compiling() or is_without_numbers(x):
            return forward(*tensors, detach, grad or keep)[:4]
        if grad:
            plain = not torch._C._are_functorch_transforms_active()
            return apply(*tensors, detach, True) if plain else Eager.apply(*tensors, detach, True)
        return run_forward(x, h0, c0, Resets(mask, reset_h, reset_c, detach), weights, keep)[:4]

    return layer


def _flat(outputs: Outputs) -> Any:
    y, h_n, c_n, cells, kept = outputs
    tensors = (y, h_n, c_n, cells, *kept, *[None] * (_KEPT - len(kept)))
    return tuple([y.new_empty(0) if t is None else t for t in tensors])


def _kept(saved: tuple[Any, ...], detach_at_reset: bool) -> Kept:
    x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, y, cells, *kept = saved
    return Kept(x, h0, c0, Resets(mask, reset_h, reset_c, detach_at_reset), Weights(w_ih, w_hh), y, cells, tuple(kept))
