"""LSTM and GRU over whole sequences in C on a CPU, in float32: the calls of C, and whether C is in use.

One code path for both cells: a GRU is a call with c0 = None. `reference/` specifies what is computed. Without a compiler
and without a prebuilt library `in_use` is False, and `dispatch` takes the portable kernel.
"""

import functools
import os
import warnings

import torch
from torch import Tensor

from holdfast.kernels.cpu import library
from holdfast.kernels.gated_operator import Kept, Outputs, make_operator, new_gradients
from holdfast.kernels.operands import Gradients, Needed, Resets, Weights


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
    """For display: kernel, isa, library, and the reason if the C kernels are not in use."""
    report = {"kernel": "portable", "isa": None, "library": None}
    if os.environ.get("HOLDFAST_CPU_KERNEL") == "portable":
        return {**report, "reason": "HOLDFAST_CPU_KERNEL=portable"}
    loaded = library.load()
    if loaded.reason is not None:
        return {**report, "reason": loaded.reason}
    return {**report, "kernel": "native", "isa": loaded.isa, "library": str(loaded.path), "reason": None}


# Names in c/job.h.
_INPUTS = ("x", "h0", "c0", "resets", "reset_h", "reset_c", "w_ih", "w_hh", "b_ih", "b_hh")
_OUTPUTS = ("y", "h_n", "c_n", "cells", "gates")
_KEPT = ("x", "h0", "c0", "resets", "reset_h", "reset_c", "w_ih", "w_hh", "y", "cells", "gates")
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
    outputs = _new_outputs(tensors["x"], h0, tensors["w_hh"], c0 is not None, keep)
    found = (*outputs[:4], *outputs.kept)
    tensors.update({name: tensor for name, tensor in zip(_OUTPUTS, found) if tensor is not None})
    return outputs, library.PreparedCall("forward", detach, tensors)


def prepare_forward(
    x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights
) -> tuple[Kept, library.PreparedCall]:
    """What a layer's forward keeps for its backward, and the call that computes it from what its inputs hold then.

    All inputs are contiguous and stay where they are.
    """
    outputs, call = _forward_call(x, h0, c0, resets, weights, keep=True)
    return Kept(x, h0, c0, resets, weights, outputs.y, outputs.cells, outputs.kept), call


def _new_outputs(x: Tensor, h0: Tensor, w_hh: Tensor, is_lstm: bool, keep: bool) -> Outputs:
    T, B, _ = x.shape
    H = w_hh.shape[1]
    width = library.padded(H)
    cells = x.new_empty(T, B, width) if keep and is_lstm else None
    gates = (x.new_empty(T, B, 4, width),) if keep else ()
    return Outputs(x.new_empty(T, B, H), x.new_empty(B, H), x.new_empty(B, H) if is_lstm else None, cells, gates)


def run_backward(dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    """The gradients of one layer without autograd."""
    gradients = new_gradients(kept, needed)
    _backward_call(dy, dh_n, dc_n, kept, gradients)()
    return gradients


def prepare_backward(dy: Tensor, kept: Kept, gradients: Gradients) -> library.PreparedCall:
    """The call that computes a layer's gradients from what `dy` and `kept` hold then. All tensors are contiguous."""
    return _backward_call(dy, None, None, kept, gradients)


def _backward_call(
    dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, kept: Kept, gradients: Gradients
) -> library.PreparedCall:
    x, h0, c0, (mask, reset_h, reset_c, detach), weights, y, cells, (gates, *_) = kept
    cells = None if c0 is None else cells
    values = (x, h0, c0, mask, reset_h, reset_c, weights.w_ih, weights.w_hh, y, cells, gates)
    named = (*zip(("dy", "dh_n", "dc_n"), (dy, dh_n, dc_n)), *zip(_KEPT, values))
    tensors = {name: tensor.contiguous() for name, tensor in named if tensor is not None}
    tensors.update({name: gradient for name, gradient in zip(_GRADIENTS, gradients) if gradient is not None})
    return library.PreparedCall("backward", detach, tensors)


sequence = make_operator("recurrence_native", run_forward, run_backward, _new_outputs)


def step(x: Tensor, h: Tensor, c: Tensor | None, resets: Resets, weights: Weights) -> tuple[Tensor, ...]:
    """One step without gradients, x [B, I] and resets.mask [B]: the new h, and for an LSTM the new c."""
    mask = resets.mask
    if torch.compiler.is_compiling():
        resets = resets._replace(mask=None if mask is None else mask.unsqueeze(0), detach=False)
        _, h, new_c, _ = sequence(x.unsqueeze(0), h, c, resets, weights)
        return (h,) if c is None or new_c is None else (h, new_c)
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
        y, h_n, c_n, cells = sequence(x, h0, c0, resets, weights, keep=True)
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
