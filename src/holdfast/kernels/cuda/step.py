"""One step of an LSTM or GRU on an NVIDIA GPU without gradients: a single launch, which CUDA graphs can capture.

`x` [B, I], states [B, H], resets [B] bool or None; signatures as the steps of the other kernels.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import functools

import torch
from torch import Tensor

from holdfast.kernels.cuda import nvrtc
from holdfast.kernels.cuda.kernels import KIND, address, bias_like, compiled, limits, ready, vector
from holdfast.kernels.cuda.tiles import step_tile


def supports(x: Tensor, h: Tensor) -> bool:
    """Whether the fused step takes this input and state."""
    hidden = h.shape[-1]
    if not (x.is_cuda and x.dtype in KIND and h.dtype in KIND and x.numel() > 0):
        return False
    return hidden % 8 == 0 and 8 <= hidden <= 2048 and _can_compile(x.get_device())


@nvrtc.constant_when_compiled
def _can_compile(device: int) -> bool:
    return nvrtc.is_available() and limits(device)[2] >= 80


@functools.cache
def _kernel(
    gates: int, hidden: int, inputs: int, batch: int, kinds: tuple[int, int, int], resets: bool, fill: bool, device: int
) -> tuple[nvrtc.Launch, int]:
    """The kernel with its grid, and the number of tiles of rows."""
    tile = step_tile(hidden, batch)
    x_kind, state_kind, w_kind = kinds
    constants = {
        "GRU": gates == 3, "HIDDEN": hidden, "INPUTS": inputs, "NH": tile.units, "WU": tile.warp_units, "HALVES": 2,
        "MT": 1, "WARP_ROWS": tile.warp_rows, "TEAMS": 1, "KC": 64, "STAGES": 1, "W_REGISTERS": 0, "SAVE": 0,
        "ONE_CHUNK": 1,
        "Y_KIND": 0, "RESETS": resets, "FILL": fill, "X_KIND": x_kind, "S_KIND": state_kind, "W_KIND": w_kind,
    }  # fmt: skip
    row_tiles = -(-batch // tile.rows)
    kernel = compiled("step", "recurrence_step", constants, 0, device)
    return kernel.launcher(row_tiles * tile.split(hidden), tile.threads, "12q2i"), row_tiles


def _step(gates, x, h, c, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh):
    batch, hidden = h.shape
    kinds = (KIND[x.dtype], KIND[h.dtype], KIND[w_ih.dtype])
    fill = resets is not None and (fill_h is not None or fill_c is not None)
    device = x.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return _step(gates, x, h, c, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh)
    launch, row_tiles = _kernel(gates, hidden, x.shape[1], batch, kinds, resets is not None, fill, device)
    x, h, c = ready(x), ready(h), None if c is None else ready(c)
    w_ih, w_hh, b_ih, b_hh = ready(w_ih), ready(w_hh), bias_like(b_ih, w_ih), bias_like(b_hh, w_ih)
    resets, fill_h, fill_c = None if resets is None else resets.contiguous(), vector(fill_h), vector(fill_c)
    h_out, c_out = torch.empty_like(h), None if c is None else torch.empty_like(c)
    launch(
        torch._C._cuda_getCurrentRawStream(device), x.data_ptr(), h.data_ptr(), address(c), address(resets),
        address(fill_h), address(fill_c), w_ih.data_ptr(), w_hh.data_ptr(), address(b_ih), address(b_hh),
        h_out.data_ptr(), address(c_out), batch, row_tiles,
    )  # fmt: skip
    return h_out, c_out


@torch.library.custom_op("holdfast::gpu_lstm_step", mutates_args=())
def gpu_lstm_step(
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
    """(h, c) after the step."""
    return _step(4, x, h, c, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh)


@gpu_lstm_step.register_fake
def _(x, h, c, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh):
    return torch.empty_like(h), torch.empty_like(c)


@torch.library.custom_op("holdfast::gpu_gru_step", mutates_args=())
def gpu_gru_step(
    x: Tensor,
    h: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Tensor:
    """h after the step."""
    return _step(3, x, h, None, resets, fill_h, None, w_ih, w_hh, b_ih, b_hh)[0]


@gpu_gru_step.register_fake
def _(x, h, resets, fill_h, w_ih, w_hh, b_ih, b_hh):
    return torch.empty_like(h)


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
    """(h, c) after a reset of the flagged rows and one step; no gradients."""
    if torch.compiler.is_compiling():
        return gpu_lstm_step(x, h, c, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh)
    return _step(4, x, h, c, resets, fill_h, fill_c, w_ih, w_hh, b_ih, b_hh)


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
    """h after a reset of the flagged rows and one step; no gradients."""
    if torch.compiler.is_compiling():
        return gpu_gru_step(x, h, resets, fill_h, w_ih, w_hh, b_ih, b_hh)
    return _step(3, x, h, None, resets, fill_h, None, w_ih, w_hh, b_ih, b_hh)[0]
