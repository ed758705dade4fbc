"""LSTM and GRU on CPUs in float32, whole sequences in C: resets cost nothing, and no step passes through Python.

`reference.py` says what is computed. `supports` says when; where there is no compiler and no prebuilt library it is
never, and the portable kernel takes over.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from holdfast.kernels.cpu import build as native_build
from holdfast.kernels.cpu import library as native_library


def in_use() -> bool:
    """Whether this kernel is there and wanted; builds it if need be. HOLDFAST_CPU_KERNEL=portable|native decides."""
    wanted = os.environ.get("HOLDFAST_CPU_KERNEL", "auto")
    if wanted not in ("auto", "portable", "native"):
        raise ValueError(f"HOLDFAST_CPU_KERNEL={wanted!r}: expected 'portable', 'native' or 'auto'")
    if wanted == "portable":
        return False
    reason = native_library.load().reason
    if reason is not None and wanted == "native":
        raise RuntimeError(f"HOLDFAST_CPU_KERNEL=native, but there is no native kernel: {reason}")
    if reason is not None:
        _say_once(reason)
    return reason is None


# torch.compiler.assume_constant_result does just this, after importing the whole compiler: that doubles `import torch`.
in_use._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(
        f"LSTM and GRU run on the portable kernel, several times slower on a CPU than the native one: {reason}. "
        "HOLDFAST_CPU_KERNEL=portable silences this.",
        RuntimeWarning,
        stacklevel=2,
    )


def supports(recurrence: str, x: Tensor, h0: Tensor) -> bool:
    """Whether `lstm`/`gru` run this call: on the CPU, input (and with it the weights) and state in float32."""
    single = x.dtype == torch.float32 and h0.dtype == torch.float32
    return single and x.device.type == "cpu" and recurrence in ("lstm", "gru") and in_use()


def status() -> dict[str, str | None]:
    """What is in use, for people: kernel, isa, compiler, library, and the reason if it is not this kernel."""
    compiler = native_build.find_compiler()
    report = {"kernel": "portable", "isa": None, "compiler": " ".join(compiler) if compiler else None, "library": None}
    if os.environ.get("HOLDFAST_CPU_KERNEL") == "portable":
        return {**report, "reason": "HOLDFAST_CPU_KERNEL=portable"}
    library = native_library.load()
    if library.reason is not None:
        return {**report, "reason": library.reason}
    return {**report, "kernel": "native", "isa": library.isa, "library": str(library.path), "reason": None}


# One function for both cells: a GRU is a call without c0. It exists twice: as an operator that torch.compile sees as
# one node, and as an autograd function, which costs eager mode 0.1 ms less per call.

_INPUTS = ("x", "h0", "c0", "resets", "fill_h", "fill_c", "w_ih", "w_hh", "b_ih", "b_hh")
_KEPT = ("x", "h0", "c0", "resets", "fill_h", "fill_c", "w_ih", "w_hh", "y", "gates", "cells")
_GRADS = ("dx", "dh0", "dc0", "dfill_h", "dfill_c", "dw_ih", "dw_hh", "db_ih", "db_hh")


def _new_outputs(x: Tensor, w_hh: Tensor, is_lstm: bool, keep: bool) -> tuple[Tensor, ...]:
    """y, h_n, c_n, and what the backward needs: gates [T, B, 4, padded], cells [T, B, padded]."""
    T, B, _ = x.shape
    H = w_hh.shape[1]
    width = native_library.padded(H)
    return (
        x.new_empty(T, B, H),
        x.new_empty(B, H),
        x.new_empty((B, H) if is_lstm else 0),
        x.new_empty((T, B, 4, width) if keep else 0),
        x.new_empty((T, B, width) if keep and is_lstm else 0),
    )


def run_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """The tensors named in _INPUTS, then `cut` and `keep`: whether the backward will want gates and cells."""
    *inputs, cut, keep = arguments
    tensors = {name: tensor.contiguous() for name, tensor in zip(_INPUTS, inputs) if tensor is not None}
    outputs = _new_outputs(tensors["x"], tensors["w_hh"], "c0" in tensors, keep)
    tensors.update(zip(("y", "h_n", "c_n", "gates", "cells"), outputs if keep else outputs[:3]))
    native_library.run("forward", cut, tensors)
    return outputs


def _new_grads(x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, need: list[bool]) -> tuple[Tensor, ...]:
    """In the order of _GRADS; those not needed are empty."""
    rows, H = w_hh.shape
    shapes = (x.shape, h0.shape, h0.shape, (H,), (H,), w_ih.shape, w_hh.shape, (rows,), (rows,))
    return tuple([x.new_empty(shape if needed else 0) for shape, needed in zip(shapes, need)])


def run_backward(
    dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, *arguments: Any, into: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """The tensors named in _KEPT, then `cut` and which of _GRADS are needed. `into`: what an earlier call of these sizes
    gave, to be overwritten."""
    *kept, cut, need = arguments
    named = (*zip(("dy", "dh_n", "dc_n"), (dy, dh_n, dc_n)), *zip(_KEPT, kept))
    tensors = {name: tensor.contiguous() for name, tensor in named if tensor is not None}
    grads = into or _new_grads(tensors["x"], tensors["h0"], tensors["w_ih"], tensors["w_hh"], need)
    tensors.update({name: grad for name, grad, needed in zip(_GRADS, grads, need) if needed})
    native_library.run("backward", cut, tensors)
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, _, _, gates, cells = output
    ctx.save_for_backward(*inputs[:8], y, gates, cells)  # _KEPT
    ctx.cut = inputs[10]
    ctx.set_materialize_grads(False)


def _grad(
    run: Callable[..., tuple[Tensor, ...]], ctx: Any, dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None
) -> tuple[Tensor | None, ...]:
    asked = ctx.needs_input_grad
    need = [*asked[:3], *asked[4:10]]  # all of _INPUTS but resets
    grads = run(dy, dh_n, dc_n, *ctx.saved_tensors, ctx.cut, need)
    dx, dh0, dc0, *rest = [grad if needed else None for grad, needed in zip(grads, need)]
    return dx, dh0, dc0, None, *rest, None, None


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = run_forward(*inputs)
        _save(ctx, inputs, output)
        y, h_n, c_n, _, cells = output
        ctx.mark_non_differentiable(cells)
        return y, h_n, c_n, cells

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        return _grad(run_backward, ctx, dy, dh_n, dc_n)


@custom_op("holdfast::native_forward", mutates_args=())
def _forward(
    x: Tensor,
    h0: Tensor,
    c0: Optional[Tensor],
    resets: Optional[Tensor],
    fill_h: Optional[Tensor],
    fill_c: Optional[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Optional[Tensor],
    b_hh: Optional[Tensor],
    cut: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run_forward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, keep)  # type: ignore[return-value]


@_forward.register_fake
def _(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, keep):  # type: ignore[no-untyped-def]
    return _new_outputs(x, w_hh, c0 is not None, keep)


@custom_op("holdfast::native_backward", mutates_args=())
def _backward(
    dy: Optional[Tensor],
    dh_n: Optional[Tensor],
    dc_n: Optional[Tensor],
    x: Tensor,
    h0: Tensor,
    c0: Optional[Tensor],
    resets: Optional[Tensor],
    fill_h: Optional[Tensor],
    fill_c: Optional[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    y: Tensor,
    gates: Tensor,
    cells: Tensor,
    cut: bool,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = run_backward(dy, dh_n, dc_n, x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, y, gates, cells, cut, need)
    return grads  # type: ignore[return-value]


@_backward.register_fake
def _(dy, dh_n, dc_n, x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, y, gates, cells, cut, need):  # type: ignore[no-untyped-def]
    return _new_grads(x, h0, w_ih, w_hh, need)


def _compiled_grad(ctx: Any, dy: Any, dh_n: Any, dc_n: Any, *_: Any) -> tuple[Tensor | None, ...]:
    return _grad(_backward, ctx, dy, dh_n, dc_n)


_forward.register_autograd(_compiled_grad, setup_context=_save)


def _sequence(*arguments: Any, cells: bool = False) -> Any:
    """y, h_n, c_n, ..., and last the cells, if they are asked for."""
    grad = torch.is_grad_enabled() and any([isinstance(a, Tensor) and a.requires_grad for a in arguments])
    if torch.compiler.is_compiling():
        return _forward(*arguments, grad or cells)
    return _Eager.apply(*arguments, grad) if grad else run_forward(*arguments, cells)  # type: ignore[no-untyped-call]


def lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.lstm`."""
    y, h_n, c_n, *_ = _sequence(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut)
    return y, h_n, c_n


def lstm_with_cells(*arguments: Any, cut: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `lstm`, and the cell state after every step, [T, B, H], without gradients."""
    y, h_n, c_n, *_, cells = _sequence(*arguments, cut, cells=True)
    return y, h_n, c_n, cells[..., : y.shape[-1]].detach()


def gru(
    x: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `reference.gru`."""
    y, h_n, *_ = _sequence(x, h0, None, resets, fill_h, None, w_ih, w_hh, b_ih, b_hh, cut)
    return y, h_n


def _step(*inputs: Any) -> tuple[Tensor, ...]:
    """h, and for an LSTM c; the arguments are _INPUTS with x [B, I] and resets [B]."""
    if torch.compiler.is_compiling():
        x, h, c, resets, *rest = inputs
        _, h, c, *_ = _forward(
            x.unsqueeze(0), h, c, None if resets is None else resets.unsqueeze(0), *rest, False, False
        )
        return h, c
    tensors = {name: tensor.contiguous() for name, tensor in zip(_INPUTS, inputs) if tensor is not None}
    outputs = [torch.empty_like(tensors[name]) for name in ("h0", "c0") if name in tensors]
    tensors.update(zip(("y", "c_n"), outputs))
    native_library.run("step", False, tensors)
    return tuple(outputs)


def lstm_step(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One step without gradients: x [B, I], resets [B] -> (h, c). Gates, pointwise part and reset in one call."""
    h, c = _step(x, h, c, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh)
    return h, c


def gru_step(
    x: Tensor,
    h: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Tensor:
    """One step without gradients: x [B, I], resets [B] -> h."""
    return _step(x, h, None, resets, fill_h, None, w_ih, w_hh, b_ih, b_hh)[0]
