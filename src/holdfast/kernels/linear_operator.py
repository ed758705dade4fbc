"""A linear recurrence as a differentiable operator, from a forward and a backward. `reference/linear.py` specifies it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from holdfast.kernels import operators
from holdfast.kernels.operands import Resets


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

    def run(b: Tensor, a: Tensor | None, h0: Tensor, mask: Any, fill: Any, detach: bool, form: str) -> Sequence[Any]:
        return run_forward(a, b, h0, Resets(mask, fill, None, detach), form)

    def differentiate(d: Any, inputs: Any, outputs: Any, options: Any, needed: Sequence[bool]) -> Sequence[Any]:
        (b, a, h0, mask, fill), (detach, form) = inputs, options
        kept = Kept(a, b, h0, outputs[0], Resets(mask, fill, None, detach), form)
        da, db, dh0, d_fill = run_backward(d[0], d[1], kept, Needed(needed[1], needed[2], needed[4]))
        return db, da, dh0, None, d_fill

    def empty(b: Tensor, a: Any, h0: Tensor, *_: Any) -> Sequence[Any]:
        return b.new_empty(*b.shape[:2], h0.shape[1]), h0.new_empty(h0.shape)

    inputs = ("b", "a?", "h0", "mask?", "fill?")
    call = operators.make_operator(
        name, inputs, ("bool detach", "str form"), run, differentiate, empty, outputs=2, differentiable=2
    )

    def sequence(a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str = "real") -> tuple[Tensor, Tensor]:
        mask, fill, _, detach = resets
        if mask is None or detach:
            fill = None
        h, h_n = call(b, a, h0, mask, fill, detach, form)
        return h, h_n

    return sequence
