"""LSTM and GRU on CPUs in float32, whole sequences in C: resets cost nothing, and no step passes through Python.

`reference.py` says what is computed. `supports` says when; where there is no compiler and no prebuilt library it is
never, and the portable kernel takes over.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch.library import custom_op

from holdfast.kernels import native_build, native_library


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether the library is loaded, after building it if need be. Says once why not."""
    return native_library.load().handle is not None


def supports(recurrence: str, x: Tensor, h0: Tensor) -> bool:
    """Whether `lstm`/`gru` run this call: on the CPU, input (and with it the weights) and state in float32."""
    single = x.dtype == torch.float32 and h0.dtype == torch.float32
    return single and x.device.type == "cpu" and recurrence in ("lstm", "gru") and available()


def status() -> dict[str, str | None]:
    """What is in use, for people: kernel, isa, compiler, library, and the reason if there is none."""
    library = native_library.load()
    compiler = native_build.find_compiler()
    return {
        "kernel": "native" if library.handle is not None else "portable",
        "isa": library.isa,
        "compiler": " ".join(compiler) if compiler else None,
        "library": str(library.path) if library.path else None,
        "reason": library.reason,
    }


# One operator for both cells: a GRU is a call without c0.


def _sizes(x: Tensor, w_hh: Tensor) -> tuple[int, int, int, int]:
    T, B, inputs = x.shape
    return T, B, inputs, w_hh.shape[1]


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _forward_outputs(x: Tensor, h0: Tensor, w_hh: Tensor, is_lstm: bool, keep: bool) -> tuple[Tensor, ...]:
    """y, h_n, c_n, and what the backward needs: gates [T, B, 4, padded], cells [T, B, padded]."""
    T, B, _, H = _sizes(x, w_hh)
    width = native_library.padded(H)
    return (
        x.new_empty(T, B, H),
        x.new_empty(B, H),
        x.new_empty((B, H) if is_lstm else 0),
        x.new_empty((T, B, 4, width) if keep else 0),
        x.new_empty((T, B, width) if keep and is_lstm else 0),
    )


def _run_forward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    cut: bool,
    keep: bool,
) -> tuple[Tensor, ...]:
    is_lstm = c0 is not None
    y, h_n, c_n, gates, cells = outputs = _forward_outputs(x, h0, w_hh, is_lstm, keep)
    native_library.run(
        "forward",
        _sizes(x, w_hh),
        is_lstm,
        cut,
        x=_whole(x),
        h0=_whole(h0),
        c0=_whole(c0),
        resets=_whole(resets),
        fill_h=_whole(fill_h),
        fill_c=_whole(fill_c),
        w_ih=_whole(w_ih),
        w_hh=_whole(w_hh),
        b_ih=_whole(b_ih),
        b_hh=_whole(b_hh),
        y=y,
        h_n=h_n,
        c_n=c_n,
        gates=gates if keep else None,
        cells=cells,
    )
    return outputs


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
    outputs = _run_forward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, keep)
    return outputs  # type: ignore[return-value]


@_forward.register_fake
def _(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh, cut, keep):  # type: ignore[no-untyped-def]
    return _forward_outputs(x, h0, w_hh, c0 is not None, keep)


def _backward_outputs(
    x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, is_lstm: bool, need: list[bool]
) -> tuple[Tensor, ...]:
    """dx, dh0, dc0, dfill_h, dfill_c, dW_ih, dW_hh, db_ih, db_hh; those not needed are empty."""
    H = w_hh.shape[1]
    rows = w_hh.shape[0]
    shapes = (x.shape, h0.shape, h0.shape, (H,), (H,), w_ih.shape, w_hh.shape, (rows,), (rows,))
    return tuple(x.new_empty(shape if needed else 0) for shape, needed in zip(shapes, need))


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
    is_lstm = c0 is not None
    outputs = _backward_outputs(x, h0, w_ih, w_hh, is_lstm, need)
    names = ("dx", "dh0", "dc0", "dfill_h", "dfill_c", "dw_ih", "dw_hh", "db_ih", "db_hh")
    wanted = {name: output for name, output, needed in zip(names, outputs, need) if needed}
    native_library.run(
        "backward",
        _sizes(x, w_hh),
        is_lstm,
        cut,
        x=_whole(x),
        h0=_whole(h0),
        c0=_whole(c0),
        resets=_whole(resets),
        fill_h=_whole(fill_h),
        fill_c=_whole(fill_c),
        w_ih=_whole(w_ih),
        w_hh=_whole(w_hh),
        y=y,
        gates=gates,
        cells=cells,
        dy=_whole(dy),
        dh_n=_whole(dh_n),
        dc_n=_whole(dc_n),
        **wanted,
    )
    return outputs  # type: ignore[return-value]


@_backward.register_fake
def _(dy, dh_n, dc_n, x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, y, gates, cells, cut, need):  # type: ignore[no-untyped-def]
    return _backward_outputs(x, h0, w_ih, w_hh, c0 is not None, need)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, _, _, cut, _ = inputs
    y, _, _, gates, cells = output
    ctx.save_for_backward(x, h0, c0, resets, fill_h, fill_c, w_ih, w_hh, y, gates, cells)
    ctx.cut = cut
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, dy: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    asked = ctx.needs_input_grad
    need = [*asked[:3], *asked[4:10]]  # all but resets
    grads = _backward(dy, dh_n, dc_n, *ctx.saved_tensors, ctx.cut, need)
    dx, dh0, dc0, *rest = (grad if needed else None for grad, needed in zip(grads, need))
    return dx, dh0, dc0, None, *rest, None, None


_forward.register_autograd(_grad, setup_context=_save)


def _sequence(*arguments: Any) -> tuple[Tensor, ...]:
    differentiated = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    return _forward(*arguments, torch.is_grad_enabled() and len(differentiated) > 0)


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
