"""The linear recurrence in C on a CPU, in float32. `reference/linear.py` specifies what is computed."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from holdfast.kernels.cpu import library
from holdfast.kernels.linear_operator import Gradients, Kept, Needed, make_operator, new_gradients
from holdfast.kernels.operands import Resets

_FORMS = ("real", "complex", "gated")  # LinearForm in c/job.h
_LinearJob = library.struct("LinearRecurrence")
# The arithmetic is little and the memory much: an element counts as this many multiplications when threads are chosen.
_MULTIPLICATIONS_PER_ELEMENT = 64


def _forward(a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str) -> tuple[Tensor, Tensor]:
    h, h_n = b.new_empty(*b.shape[:2], h0.shape[1]), torch.empty_like(h0, memory_format=torch.contiguous_format)
    _call("forward", Kept(a, b, h0, h, resets, form), h_n=h_n)
    return h, h_n


def _backward(dh: Tensor | None, dh_n: Tensor | None, kept: Kept, needed: Needed) -> Gradients:
    gradients = new_gradients(kept, needed)
    da, db, dh0, d_fill = gradients
    _call("backward", kept, dh=dh, dh_n=dh_n, da=da, db=db, dh0=dh0, d_fill=d_fill)
    return gradients


def _call(which: str, kept: Kept, **others: Tensor | None) -> None:
    handle = library.load().handle
    if handle is None:
        raise RuntimeError(f"the native kernel is not available: {library.load().reason}")
    a, b, h0, h, (mask, fill, _, detach), form = kept
    T, B, W = h.shape
    elements = {"a": T * B * W, "b": T * B * W, "h0": B * W, "resets": T * B, "fill": W, "h": T * B * W, "h_n": B * W}
    per_channel = a is not None and a.dim() == 1
    if per_channel:
        elements["a"] = W
    if form == "gated":
        elements["b"] *= 2
    threads = library.threads_for(B, T * B * W * _MULTIPLICATIONS_PER_ELEMENT)
    channels = W // 2 if form == "complex" else W
    job = _LinearJob(T, B, channels, _FORMS.index(form), per_channel, detach, threads)
    alive = []
    for name, tensor in {"a": a, "b": b, "h0": h0, "resets": mask, "fill": fill, "h": h, **others}.items():
        if tensor is None:
            continue
        count = elements[name.removeprefix("d_") if name == "d_fill" else name.removeprefix("d")]
        dtype = torch.bool if name == "resets" else torch.float32
        alive.append(tensor.contiguous())
        setattr(job, name, library.address(alive[-1], count, dtype, name))
    status = getattr(handle, f"holdfast_linear_{which}")(ctypes.byref(job))
    if status:
        raise library.failure(status, f"T={T}, B={B}, W={W}, {form}")


_differentiable = make_operator("linear_native", _forward, _backward)


def sequence(a: Tensor | None, b: Tensor, h0: Tensor, resets: Resets, form: str = "real") -> tuple[Tensor, Tensor]:
    """As `reference.linear.sequence`; without gradients straight into C."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or resets.mask is not None:
        return _differentiable(a, b, h0, resets, form)
    return _forward(a, b, h0, resets, form)
