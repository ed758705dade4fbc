"""Makes a differentiable operator of a linear recurrence's forward and backward. `reference/linear.py` specifies it.

Autograd exists twice, as for the gated cells: as an operator that torch.compile sees as one node, and as an autograd
function, which costs eager mode less per call. An operator returns tensors only, so an absent one is empty there.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Protocol

import torch
from torch import Tensor
from torch.library import custom_op

from holdfast.checks import is_without_numbers
from holdfast.kernels.operands import Resets, refuse_second_derivative


class Kept(NamedTuple):
    """What a backward needs from its forward; h is the state after every step."""

    a: Tensor | None
    b: Tensor
    h0: Tensor
    h: Tensor
    resets: Resets
    form: str


class Gradients(NamedTuple):
    """None where not needed; that of b is always given."""

    a: Tensor | None
    b: Tensor
    h0: Tensor | None
    fill: Tensor | None


class Needed(NamedTuple):
    """Which gradients are needed besides that of b."""

    a: bool
    h0: bool
    fill: bool


Forward = Callable[[Tensor | None, Tensor, Tensor, Resets, str], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor | None, Tensor | None, Kept, Needed], Gradients]


class LinearRecurrence(Protocol):
    """The signature of `reference.linear.sequence`."""

    def __call__(
        self, a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str = "real"
    ) -> tuple[Tensor, Tensor]: ...


def new_gradients(kept: Kept, needed: Needed) -> Gradients:
    """Contiguous tensors to be filled."""
    a, b, h0, *_ = kept
    return Gradients(
        None if a is None or not needed.a else a.new_empty(a.shape),
        b.new_empty(b.shape),
        h0.new_empty(h0.shape) if needed.h0 else None,
        h0.new_empty(h0.shape[1:]) if needed.fill else None,
    )


def make_operator(name: str, run_forward: Forward, run_backward: Backward) -> LinearRecurrence:
    """`sequence` of an implementation, from its forward and backward without autograd. Registers holdfast::{name}."""

    @custom_op(f"holdfast::{name}", mutates_args=())
    def forward(
        a: Optional[Tensor],
        b: Tensor,
        h0: Tensor,
        mask: Optional[Tensor],
        fill: Optional[Tensor],
        detach_at_reset: bool,
        form: str,
    ) -> tuple[Tensor, Tensor]:
        return run_forward(a, b, h0, Resets(mask, fill, None, detach_at_reset), form)

    @forward.register_fake
    def _(a, b, h0, mask, fill, detach_at_reset, form):
        return b.new_empty(*b.shape[:2], h0.shape[1]), h0.new_empty(h0.shape)

    @custom_op(f"holdfast::{name}_backward", mutates_args=())
    def backward(
        dh: Optional[Tensor],
        dh_n: Optional[Tensor],
        a: Optional[Tensor],
        b: Tensor,
        h0: Tensor,
        mask: Optional[Tensor],
        fill: Optional[Tensor],
        h: Tensor,
        detach_at_reset: bool,
        form: str,
        needed: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kept = Kept(a, b, h0, h, Resets(mask, fill, None, detach_at_reset), form)
        return _tensors(run_backward(dh, dh_n, kept, Needed(*needed)))

    @backward.register_fake
    def _(dh, dh_n, a, b, h0, mask, fill, h, detach_at_reset, form, needed):
        return _tensors(new_gradients(Kept(a, b, h0, h, Resets(), form), Needed(*needed)))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        a, b, h0, mask, fill, ctx.detach_at_reset, ctx.form = inputs
        ctx.save_for_backward(a, b, h0, mask, fill, output[0])
        ctx.set_materialize_grads(False)

    def gradients_of_operator(ctx: Any, dh: Any, dh_n: Any) -> tuple[Any, ...]:
        if dh is None and dh_n is None:
            return (None,) * 7
        needed = _needed(ctx.needs_input_grad)
        out = backward(dh, dh_n, *ctx.saved_tensors, ctx.detach_at_reset, ctx.form, list(needed))
        return _of_inputs(Gradients(*out), ctx.needs_input_grad)

    forward.register_autograd(gradients_of_operator, setup_context=save)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
            a, b, h0, mask, fill, detach, form = inputs
            output = run_forward(a, b, h0, Resets(mask, fill, None, detach), form)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, dh: Tensor | None, dh_n: Tensor | None) -> tuple[Any, ...]:
            refuse_second_derivative()
            if dh is None and dh_n is None:
                return (None,) * 7
            a, b, h0, mask, fill, h = ctx.saved_tensors
            kept = Kept(a, b, h0, h, Resets(mask, fill, None, ctx.detach_at_reset), ctx.form)
            flags = ctx.needs_input_grad
            return _of_inputs(run_backward(dh, dh_n, kept, _needed(flags)), flags)

    def sequence(a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str = "real") -> tuple[Tensor, Tensor]:
        mask, fill, _, detach = resets
        if mask is None or detach:
            fill = None
        if torch.compiler.is_compiling() or is_without_numbers(b):
            return forward(a, b, h0, mask, fill, detach, form)
        tensors = (a, b, h0, fill)
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
            return Eager.apply(a, b, h0, mask, fill, detach, form)  # type: ignore[no-untyped-call]
        return run_forward(a, b, h0, resets, form)

    return sequence


def _tensors(gradients: Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b = gradients.b
    return tuple(b.new_empty(0) if g is None else g for g in gradients)  # type: ignore[return-value]


def _needed(flags: tuple[bool, ...]) -> Needed:
    """From autograd's `needs_input_grad`."""
    return Needed(flags[0], flags[2], flags[4])


def _of_inputs(gradients: Gradients, flags: tuple[bool, ...]) -> tuple[Any, ...]:
    """What autograd expects, in the order of the operator's inputs."""
    a, b, h0, fill = (g if need else None for g, need in zip(gradients, (flags[0], flags[1], flags[2], flags[4])))
    return a, b, h0, None, fill, None, None
