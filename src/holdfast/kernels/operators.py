"""Makes a differentiable operator of a forward and a backward that know nothing of autograd.

Autograd exists twice: as an operator that torch.compile sees as one node, and as an autograd function, which costs eager mode
0.1 ms less per call. An operator returns tensors only, so an absent one is empty there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from holdfast.checks import is_without_numbers
from holdfast.kernels.operands import refuse_second_derivative

# mypy: disable-error-code="no-untyped-def,no-untyped-call"


def make_operator(
    name: str,
    inputs: Sequence[str],
    options: Sequence[str],
    run: Callable[..., Sequence[Any]],
    run_backward: Callable[..., Sequence[Any]],
    new_outputs: Callable[..., Sequence[Any]],
    outputs: int,
    differentiable: int,
) -> Callable[..., Any]:
    """A function of tensors and options, which returns `outputs` tensors, two or more. Registers holdfast::{name}.

    inputs: names of the tensors; "c0?" may be None. options: the other arguments, as in a schema ("bool keep").
    run(*tensors, *options) gives the outputs, None for an absent one; the first few are differentiable.
    run_backward(gradients, tensors, outputs, options, needed) gives a gradient for each input; one that is not needed may
    come anyway. new_outputs: as `run`, with empty tensors.
    """
    count = len(inputs)
    tensors = [f"Tensor{'?' * text.endswith('?')} {text.rstrip('?')}" for text in inputs]

    @custom_op(f"holdfast::{name}", mutates_args=(), schema=_schema([*tensors, *options], outputs))
    def forward(*arguments):
        return _present(run(*arguments), arguments[0])

    @forward.register_fake
    def _(*arguments):
        return _present(new_outputs(*arguments), arguments[0])

    incoming = [f"Tensor? d{i}" for i in range(differentiable)]
    made = [f"Tensor out{i}" for i in range(outputs)]
    schema = _schema([*incoming, *tensors, *made, *options, "bool[] needed"], count)

    @custom_op(f"holdfast::{name}_backward", mutates_args=(), schema=schema)
    def backward(*arguments):
        found = zip(inputs_of(arguments), compute(*arguments), arguments[-1])
        present = [g.to(x.dtype) if g is not None and need else None for x, g, need in found]
        return _present(present, arguments[differentiable])

    @backward.register_fake
    def _(*arguments):
        wanted = zip(inputs_of(arguments), arguments[-1])
        return _present([x.new_empty(x.shape) if need else None for x, need in wanted], arguments[differentiable])

    def inputs_of(arguments):
        return arguments[differentiable : differentiable + count]

    def compute(*arguments):
        """What the backward gives, from the arguments of its operator."""
        rest = arguments[differentiable + count : -1]
        made, chosen = rest[:outputs], rest[outputs:]
        return run_backward(arguments[:differentiable], inputs_of(arguments), made, chosen, arguments[-1])

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.options = inputs[count:]
        ctx.set_materialize_grads(False)

    def differentiate(ctx, incoming, function):
        """What autograd expects: a gradient or None for each argument of the forward."""
        if all(gradient is None for gradient in incoming):
            return (None,) * (count + len(ctx.options))
        needed = list(ctx.needs_input_grad[:count])
        found = function(*incoming, *ctx.saved_tensors, *ctx.options, needed)
        return *[g if need else None for g, need in zip(found, needed)], *[None] * len(ctx.options)

    forward.register_autograd(
        lambda ctx, *incoming: differentiate(ctx, incoming[:differentiable], backward), setup_context=save
    )

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            made = tuple(run(*arguments))
            save(ctx, arguments, made)
            ctx.mark_non_differentiable(*[t for t in made[differentiable:] if t is not None])
            return made

        @staticmethod
        def backward(ctx, *incoming):
            refuse_second_derivative()
            return differentiate(ctx, incoming[:differentiable], compute)

    # What Function.apply does when no functorch transform is active; its checks cost as much as a launch on a GPU.
    apply = super(torch.autograd.Function, Eager).apply

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or is_without_numbers(arguments[0]):
            return forward(*arguments)
        if needs_gradients(arguments[:count]):
            return (Eager.apply if torch._C._are_functorch_transforms_active() else apply)(*arguments)
        return run(*arguments)

    return call


def needs_gradients(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def _schema(arguments: Sequence[str], outputs: int) -> str:
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * outputs)})"


def _present(tensors: Sequence[Any], like: Tensor) -> tuple[Tensor, ...]:
    return tuple([like.new_empty(0) if tensor is None else tensor for tensor in tensors])
