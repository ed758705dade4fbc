"""Launches the CUDA recurrences (`recurrence_forward.cu`, `recurrence_backward.cu`) for LSTM and GRU.

For hidden sizes that are multiples of 8, from 16 to 1024, on GPUs of compute capability 8.0 and above.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from holdfast.kernels import cuda_tiles, nvrtc
from holdfast.kernels.cuda_tiles import Tile

_Y_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.cache
def _source(direction: str) -> str:
    folder = Path(__file__).parent
    return (folder / "recurrence_common.cuh").read_text() + (
        folder / f"recurrence_{direction}.cu"
    ).read_text()


@functools.cache
def _limits(device: int) -> tuple[int, int, str]:
    """(multiprocessors, shared memory of one block in bytes, architecture)."""
    p = torch.cuda.get_device_properties(device)
    return p.multi_processor_count, p.shared_memory_per_block_optin, f"sm_{p.major}{p.minor}"


def supports(gates: int, hidden_size: int, batch: int, device: torch.device) -> bool:
    """Whether the CUDA recurrence can take this size on this device."""
    if device.type != "cuda" or hidden_size % 8 or not 16 <= hidden_size <= 1024 or not nvrtc.is_available():
        return False
    index = _index(device)
    if torch.cuda.get_device_capability(index) < (8, 0):
        return False
    processors, shared, _ = _limits(index)
    for backward in (False, True):
        tile = cuda_tiles.choose_tile(gates, hidden_size, batch, backward)
        split = tile.split(hidden_size)
        if tile.shared_bytes(hidden_size, gates, backward) > shared or split > processors:
            return False
    return True


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _kernel(
    direction: str, tile: Tile, hidden_size: int, gates: int, device: int, **flags: int
) -> nvrtc.Kernel:
    constants = {
        "GRU": int(gates == 3),
        "HIDDEN": hidden_size,
        "NH": tile.units,
        "WU": tile.warp_units,
        "MT": tile.row_tiles,
        "WARP_ROWS": tile.warp_rows,
        "KC": tile.columns,
        "STAGES": tile.stages,
        **flags,
    }
    options = [
        f"--gpu-architecture={_limits(device)[2]}",
        "-std=c++17",
        *(f"-D{k}={v}" for k, v in constants.items()),
    ]
    shared = tile.shared_bytes(hidden_size, gates, direction == "backward")
    return nvrtc.Kernel(_source(direction), f"recurrence_{direction}", options, shared, device)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _cut(tile: Tile, hidden_size: int, batch: int, device: int) -> tuple[int, int, int]:
    """(blocks of a group, groups, chunks of rows)."""
    split, chunks = tile.split(hidden_size), -(-batch // tile.rows)
    return split, chunks if split == 1 else min(chunks, _limits(device)[0] // split), chunks


def forward(
    gates: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h0: Tensor,
    carry0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    y: Tensor,
    h_in: Tensor,
    saved: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Fills y, h_in, saved and, with `save`, gates; returns h_n and the other final state, fp32 (see the .cu file).

    h_in: a matrix of T*B rows with `save`, else 2*B rows (scratch).
    """
    steps, batch, hidden = y.shape
    count, device = w_hh.shape[0] // hidden, _index(y.device)
    tile = cuda_tiles.choose_tile(count, hidden, batch, False)
    split, groups, chunks = _cut(tile, hidden, batch, device)
    kernel = _kernel(
        "forward", tile, hidden, count, device, SAVE=int(save), RESETS=int(resets is not None),
        FILL=int(fill_h is not None or fill_c is not None), ONE_CHUNK=int(chunks <= groups), Y_KIND=_Y_KIND[y.dtype],
    )  # fmt: skip
    h_n, carry = torch.empty_like(h0), torch.empty_like(h0)
    arrivals = torch.zeros(chunks, dtype=torch.int32, device=y.device) if split > 1 else None
    tensors = (
        gates,
        w_hh,
        b_ih,
        b_hh,
        h0,
        carry0,
        h_n,
        carry,
        resets,
        fill_h,
        fill_c,
        y,
        h_in,
        saved,
        arrivals,
    )
    arguments = [_pointer(t) for t in tensors] + [ctypes.c_int(n) for n in (steps, batch, groups, chunks)]
    kernel.launch(split * groups, tile.threads, [*arguments, ctypes.c_longlong(h_in.stride(0))], split > 1)
    return h_n, carry


def backward(
    gates: Tensor,
    saved: Tensor,
    h_in: Tensor,
    w_hh: Tensor,
    resets: Tensor | None,
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    amax_bits: Tensor,
    steps: int,
    y_dtype: torch.dtype,
    fill: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """d_gates (scaled fp16), dh0, dc0, db [4H] and the fills' gradients, all but the first fp32 and unscaled."""
    rows, hidden = saved.shape
    batch, count, device = rows // steps, w_hh.shape[0] // hidden, _index(gates.device)
    tile = cuda_tiles.choose_tile(count, hidden, batch, True)
    split, groups, chunks = _cut(tile, hidden, batch, device)
    kernel = _kernel(
        "backward", tile, hidden, count, device, SAVE=1, RESETS=int(resets is not None), FILL=int(fill),
        ONE_CHUNK=int(chunks <= groups), Y_KIND=_Y_KIND[y_dtype],
    )  # fmt: skip
    w_t = torch.empty(hidden, count * hidden, dtype=torch.float16, device=gates.device).copy_(w_hh.t())
    d_gates = gates.new_empty(rows, 4 * hidden)
    dh0, carry = (torch.empty(batch, hidden, dtype=torch.float32, device=gates.device) for _ in range(2))
    partials = groups * tile.warp_rows * 8
    sums = torch.empty(partials, 4 * hidden, dtype=torch.float32, device=gates.device)
    fill_h, fill_c = (sums.new_empty(partials, hidden) if fill else None for _ in range(2))
    arrivals = torch.zeros(chunks, dtype=torch.int32, device=gates.device) if split > 1 else None
    tensors = (
        gates, saved, h_in, w_t, resets, dy, dh_n, dc_n, amax_bits, d_gates, dh0, carry, sums, fill_h, fill_c, arrivals,
    )  # fmt: skip
    arguments = [_pointer(t) for t in tensors] + [ctypes.c_int(n) for n in (steps, batch, groups, chunks)]
    kernel.launch(split * groups, tile.threads, [*arguments, ctypes.c_longlong(h_in.stride(0))], split > 1)
    d_fill_h, d_fill_c = (None if f is None else f.sum(0) for f in (fill_h, fill_c))
    return d_gates, dh0, carry, sums.sum(0), d_fill_h, d_fill_c
