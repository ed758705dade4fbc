"""LSTM and GRU over whole sequences in C on a CPU, in float32: the calls of C, their autograd, and whether C is in use.

One code path for both cells: a GRU is a call with c0 = None. `reference/` specifies what is computed. Without a compiler
and without a prebuilt library `in_use` is False, and `dispatch` takes the portable kernel.
"""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.library import custom_op

from holdfast.kernels.cpu import build, library
from holdfast.kernels.operands import Gradients, Needed, Resets, Weights, refuse_second_derivative

# mypy: disable-error-code="no-untyped-def"


def in_use() -> bool:
    """Whether the C kernels are available and not disabled by HOLDFAST_CPU_KERNEL=portable. Builds them if needed."""
    wanted = os.environ.get("HOLDFAST_CPU_KERNEL", "auto")
    if wanted not in ("auto", "portable", "native"):
        raise ValueError(f"HOLDFAST_CPU_KERNEL={wanted!r}: expected 'portable', 'native' or 'auto'")
    if wanted == "portable":
        return False
    reason = library.load().reason
    if reason is not None and wanted == "native":
        raise RuntimeError(f"HOLDFAST_CPU_KERNEL=native, but there is no native kernel: {reason}")
    if reason is not None:
        _warn_once(reason)
    return reason is None


# The effect of torch.compiler.assume_constant_result, which imports the whole compiler and so doubles `import torch`.
in_use._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"Recurrent cores run on the portable kernel, several times slower on a CPU than the native one: {reason}. "
        "HOLDFAST_CPU_KERNEL=portable silences this.",
        RuntimeWarning,
        stacklevel=2,
    )


def status() -> dict[str, str | None]:
    """For display: kernel, isa, compiler, library, and the reason if the C kernels are not in use."""
    compiler = build.find_compiler()
    report = {"kernel": "portable", "isa": None, "compiler": " ".join(compiler) if compiler else None, "library": None}
    if os.environ.get("HOLDFAST_CPU_KERNEL") == "portable":
        return {**report, "reason": "HOLDFAST_CPU_KERNEL=portable"}
    loaded = library.load()
    if loaded.reason is not None:
        return {**report, "reason": loaded.reason}
    return {**report, "kernel": "native", "isa": loaded.isa, "library": str(loaded.path), "reason": None}


class Outputs(NamedTuple):
    """What a forward computes; a GRU has neither c_n nor cells."""

    y: Tensor  # [T, B, H]
    h_n: Tensor  # [B, H]
    c_n: Tensor | None
    gates: Tensor | None  # [T, B, 4, padded H], for the backward
    cells: Tensor | None  # [T, B, padded H], for the backward


class Kept(NamedTuple):
    """What a backward needs from its forward."""

    x: Tensor
    h0: Tensor
    c0: Tensor | None
    resets: Resets
    weights: Weights
    y: Tensor
    gates: Tensor | None
    cells: Tensor | None


# Names in c/job.h.
_INPUTS = ("x", "h0", "c0", "resets", "reset_h", "reset_c", "w_ih", "w_hh", "b_ih", "b_hh")
_OUTPUTS = ("y", "h_n", "c_n", "gates", "cells")
_KEPT = ("x", "h0", "c0", "resets", "reset_h", "reset_c", "w_ih", "w_hh", "y", "gates", "cells")
_GRADIENTS = ("dx", "dh0", "dc0", "d_reset_h", "d_reset_c", "dw_ih", "dw_hh", "db_ih", "db_hh")


def run_forward(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, keep: bool) -> Outputs:
    """One layer without autograd. keep: also give what the backward needs."""
    outputs, call = _forward_call(x, h0, c0, resets, weights, keep)
    call()
    return outputs


def _forward_call(
    x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, keep: bool
) -> tuple[Outputs, library.PreparedCall]:
    mask, reset_h, reset_c, detach = resets
    inputs = (x, h0, c0, mask, reset_h, reset_c, *weights)
    tensors = {name: tensor.contiguous() for name, tensor in zip(_INPUTS, inputs) if tensor is not None}
    outputs = _new_outputs(tensors["x"], tensors["w_hh"], c0 is not None, keep)
    tensors.update({name: tensor for name, tensor in zip(_OUTPUTS, outputs) if tensor is not None})
    return outputs, library.PreparedCall("forward", detach, tensors)


def prepare_forward(
    x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights
) -> tuple[Kept, library.PreparedCall]:
    """What a layer's forward keeps for its backward, and the call that computes it from what its inputs hold then.

    All inputs are contiguous and stay where they are.
    """
    outputs, call = _forward_call(x, h0, c0, resets, weights, keep=True)
    return Kept(x, h0, c0, resets, weights, outputs.y, outputs.gates, outputs.cells), call


def _new_outputs(x: Tensor, w_hh: Tensor, is_lstm: bool, keep: bool) -> Outputs:
    T, B, _ = x.shape
    H = w_hh.shape[1]
    width = library.padded(H)
    return Outputs(
        x.new_empty(T, B, H),
        x.new_empty(B, H),
        x.new_empty(B, H) if is_lstm else None,
        x.new_empty(T, B, 4, width) if keep else None,
        x.new_empty(T, B, width) if keep and is_lstm else None,
    )


def run_backward(
    dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, kept: Kept, needed: Sequence[bool]
) -> Gradients:
    """The gradients of one layer without autograd. needed: flags in the order of `Needed`."""
    gradients = _new_gradients(kept.x, kept.h0, kept.weights.w_ih, kept.weights.w_hh, needed)
    _backward_call(dy, dh_n, dc_n, kept, gradients)()
    return gradients


def prepare_backward(dy: Tensor, kept: Kept, gradients: Gradients) -> library.PreparedCall:
    """The call that computes a layer's gradients from what `dy` and `kept` hold then. All tensors are contiguous."""
    return _backward_call(dy, None, None, kept, gradients)


def _backward_call(
    dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, kept: Kept, gradients: Gradients
) -> library.PreparedCall:
    x, h0, c0, (mask, reset_h, reset_c, detach), weights, y, gates, cells = kept
    values = (x, h0, c0, mask, reset_h, reset_c, weights.w_ih, weights.w_hh, y, gates, cells)
    named = (*zip(("dy", "dh_n", "dc_n"), (dy, dh_n, dc_n)), *zip(_KEPT, values))
    tensors = {name: tensor.contiguous() for name, tensor in named if tensor is not None}
    tensors.update({name: gradient for name, gradient in zip(_GRADIENTS, gradients) if gradient is not None})
    return library.PreparedCall("backward", detach, tensors)


def _new_gradients(x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, needed: Sequence[bool]) -> Gradients:
    rows, H = w_hh.shape
    shapes = (x.shape, h0.shape, h0.shape, (H,), (H,), w_ih.shape, w_hh.shape, (rows,), (rows,))
    return Gradients(*[x.new_empty(shape) if need else None for shape, need in zip(shapes, needed)])


# Autograd exists twice: as an operator that torch.compile sees as one node, and as an autograd function, which costs eager
# mode 0.1 ms less per call. An operator returns tensors only, so an absent one is empty there.


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, detach, keep = inputs
        resets = Resets(mask, reset_h, reset_c, detach)
        outputs = run_forward(x, h0, c0, resets, Weights(w_ih, w_hh, b_ih, b_hh), keep)
        _save(ctx, inputs, outputs)
        y, h_n, c_n, _, cells = outputs
        if cells is not None:
            ctx.mark_non_differentiable(cells)
        return y, h_n, c_n, cells

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        return _grad(_run_flat_backward, ctx, dy, dh_n, dc_n)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    y, _, _, gates, cells = output
    ctx.save_for_backward(*inputs[:8], y, gates, cells)  # _KEPT
    ctx.detach_at_reset = inputs[10]
    ctx.set_materialize_grads(False)


def _grad(
    run: Callable[..., tuple[Tensor | None, ...]], ctx: Any, dy: Any, dh_n: Any, dc_n: Any
) -> tuple[Tensor | None, ...]:
    flags = ctx.needs_input_grad
    gradients = run(dy, dh_n, dc_n, *ctx.saved_tensors, ctx.detach_at_reset, list(Needed.of_inputs(flags)))
    return Gradients(*gradients).of_inputs(flags)


def _run_flat_backward(dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, *arguments: Any) -> Gradients:
    """`run_backward` from _KEPT, `detach_at_reset` and `needed`."""
    x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, y, gates, cells, detach, needed = arguments
    resets, weights = Resets(mask, reset_h, reset_c, detach), Weights(w_ih, w_hh)
    return run_backward(dy, dh_n, dc_n, Kept(x, h0, c0, resets, weights, y, gates, cells), needed)


@custom_op("holdfast::native_forward", mutates_args=())
def _forward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    resets, weights = Resets(mask, reset_h, reset_c, detach_at_reset), Weights(w_ih, w_hh, b_ih, b_hh)
    return _tensors(run_forward(x, h0, c0, resets, weights, keep), x)  # type: ignore[return-value]


@_forward.register_fake
def _(x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, detach_at_reset, keep):
    return _tensors(_new_outputs(x, w_hh, c0 is not None, keep), x)


@custom_op("holdfast::native_backward", mutates_args=())
def _backward(
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
    gates: Tensor,
    cells: Tensor,
    detach_at_reset: bool,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kept = (x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, y, gates, None if c0 is None else cells)
    gradients = _run_flat_backward(dy, dh_n, dc_n, *kept, detach_at_reset, needed)
    return _tensors(gradients, x)  # type: ignore[return-value]


@_backward.register_fake
def _(dy, dh_n, dc_n, x, h0, c0, mask, reset_h, reset_c, w_ih, w_hh, y, gates, cells, detach_at_reset, needed):
    return _tensors(_new_gradients(x, h0, w_ih, w_hh, needed), x)


def _tensors(values: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple([like.new_empty(0) if value is None else value for value in values])


def _compiled_grad(ctx: Any, dy: Any, dh_n: Any, dc_n: Any, *_: Any) -> tuple[Tensor | None, ...]:
    return _grad(_backward, ctx, dy, dh_n, dc_n)


_forward.register_autograd(_compiled_grad, setup_context=_save)


def sequence(
    x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, keep_cells: bool = False
) -> Any:
    """y, h_n, c_n and, if asked for or differentiated, the cells [T, B, padded H]."""
    tensors = (x, h0, c0, resets.mask, resets.h, resets.c, *weights)
    grad = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
    if torch.compiler.is_compiling():
        y, h_n, c_n, _, cells = _forward(*tensors, resets.detach, grad or keep_cells)
        return y, h_n, c_n, cells
    if grad:
        return _Eager.apply(*tensors, resets.detach, True)  # type: ignore[no-untyped-call]
    y, h_n, c_n, _, cells = run_forward(x, h0, c0, resets, weights, keep_cells)
    return y, h_n, c_n, cells


def step(x: Tensor, h: Tensor, c: Tensor | None, resets: Resets, weights: Weights) -> tuple[Tensor, ...]:
    """One step without gradients, x [B, I] and resets.mask [B]: the new h, and for an LSTM the new c."""
    mask, reset_h, reset_c, _ = resets
    if torch.compiler.is_compiling():
        mask = None if mask is None else mask.unsqueeze(0)
        _, h, new_c, *_ = _forward(x.unsqueeze(0), h, c, mask, reset_h, reset_c, *weights, False, False)
        return (h,) if c is None else (h, new_c)
    new_h = torch.empty_like(h, memory_format=torch.contiguous_format)
    new_c = None if c is None else torch.empty_like(c, memory_format=torch.contiguous_format)
    prepare_step(x, h, c, resets, weights, new_h, new_c)()
    return (new_h,) if new_c is None else (new_h, new_c)


def prepare_step(
    x: Tensor, h: Tensor, c: Tensor | None, resets: Resets, weights: Weights, new_h: Tensor, new_c: Tensor | None
) -> library.PreparedCall:
    """A step into new_h and new_c. It can be repeated if all tensors are contiguous and stay where they are."""
    inputs = (x, h, c, resets.mask, resets.h, resets.c, *weights)
    tensors = {name: tensor.contiguous() for name, tensor in zip(_INPUTS, inputs) if tensor is not None}
    tensors["y"] = new_h
    if new_c is not None:
        tensors["c_n"] = new_c
    return library.PreparedCall("step", False, tensors)


# --- the cells, with the signatures of `reference/` --------------------------------------------------------------------


class lstm:
    """As the module `reference.lstm`."""

    @staticmethod
    def sequence(x: Tensor, h0: Tensor, c0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        return sequence(x, h0, c0, resets, weights)[:3]

    @staticmethod
    def sequence_with_cells(
        x: Tensor, h0: Tensor, c0: Tensor, resets: Resets, weights: Weights
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `sequence`, and the cell state after every step, [T, B, H], without gradients."""
        y, h_n, c_n, cells = sequence(x, h0, c0, resets, weights, keep_cells=True)
        return y, h_n, c_n, cells[..., : y.shape[-1]].detach()

    @staticmethod
    def step(x: Tensor, h: Tensor, c: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor]:
        """One step without gradients: x [B, I], resets.mask [B] -> (h, c). Gates, pointwise part and reset in one call."""
        return step(x, h, c, resets, weights)  # type: ignore[return-value]


class gru:
    """As the module `reference.gru`."""

    @staticmethod
    def sequence(x: Tensor, h0: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor, Tensor]:
        return sequence(x, h0, None, resets, weights)[:2]

    @staticmethod
    def step(x: Tensor, h: Tensor, resets: Resets, weights: Weights) -> tuple[Tensor]:
        """One step without gradients: x [B, I], resets.mask [B] -> (h,)."""
        return step(x, h, None, resets, weights)  # type: ignore[return-value]
