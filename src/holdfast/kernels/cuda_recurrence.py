"""Whole LSTM and GRU layers on NVIDIA GPUs: launches the CUDA kernels beside this file and the products between them.

For hidden sizes that are multiples of 8, from 16 to 1024, on compute capability 8.0 and above. The host side is
written for few Python operations per call: at the sizes policies have, it is what takes the time.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels import cuda_tiles, nvrtc
from holdfast.kernels.cuda_tiles import Tile
from holdfast.kernels.half_products import Gradients, packed_layout

KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SOURCES = {
    "forward": ("recurrence_common.cuh", "elements.cuh", "recurrence_forward.cu"),
    "backward": ("recurrence_common.cuh", "gradient_scale.cuh", "recurrence_backward.cu"),
    "conversions": ("gradient_scale.cuh", "elements.cuh", "conversions.cu"),
    "step": ("recurrence_common.cuh", "elements.cuh", "step.cu"),
}
_CONVERSION_THREADS = 256


@functools.cache
def _source(name: str) -> str:
    return "".join((Path(__file__).parent / file).read_text() for file in _SOURCES[name])


@functools.cache
def limits(device: int) -> tuple[int, int, int]:
    """(multiprocessors, bytes of shared memory of one block, compute capability as 10 * major + minor)."""
    p: Any = torch.cuda.get_device_properties(device)  # its stub lacks an attribute
    return p.multi_processor_count, p.shared_memory_per_block_optin, 10 * p.major + p.minor


@functools.cache
def _supports(gates: int, hidden_size: int, device: int) -> bool:
    if hidden_size % 8 or not 16 <= hidden_size <= 1024 or not nvrtc.is_available():
        return False
    processors, shared, capability = limits(device)
    batches = (1, 300, 1000, 3000)  # one of each class of the table
    tiles = (cuda_tiles.tile_for(gates, hidden_size, b, d, processors, shared) for b in batches for d in (False, True))
    return capability >= 80 and all(tiles)


@torch.compiler.assume_constant_result
def supports(gates: int, hidden_size: int, device: int) -> bool:
    """Whether these kernels can take this hidden size on this CUDA device, with any batch."""
    return _supports(gates, hidden_size, device)


class _Launch(NamedTuple):
    """A recurrence kernel and how to launch it for one batch size."""

    kernel: nvrtc.Kernel
    tile: Tile
    split: int
    groups: int
    chunks: int

    def __call__(self, arguments: bytes, stream: int) -> None:
        self.kernel.launch(self.split * self.groups, self.tile.threads, arguments, stream, self.split > 1)


@functools.cache
def _recurrence(
    direction: str,
    gates: int,
    hidden: int,
    batch: int,
    kind: int,
    w_kind: int,
    resets: bool,
    fill: bool,
    save: bool,
    device: int,
) -> _Launch:
    backward = direction == "backward"
    processors, shared, _ = limits(device)
    tile = cuda_tiles.tile_for(gates, hidden, batch, backward, processors, shared)
    if tile is None:
        raise ValueError(f"no tile of a recurrence with hidden size {hidden} fits this GPU")
    split, chunks = tile.split(hidden), -(-batch // tile.rows)
    groups = -(-chunks // tile.teams) if split == 1 else min(chunks, processors // split)
    constants = {
        "GRU": gates == 3, "HIDDEN": hidden, "NH": tile.units, "WU": tile.warp_units, "MT": tile.row_tiles,
        "WARP_ROWS": tile.warp_rows, "HALVES": tile.halves, "TEAMS": tile.teams, "STAGES": tile.stages,
        "KC": tile.columns or tile.depth(hidden, gates, backward), "W_REGISTERS": tile.registers, "SAVE": save,
        "RESETS": resets, "FILL": fill, "ONE_CHUNK": chunks <= groups * tile.teams, "Y_KIND": kind, "W_KIND": w_kind,
    }  # fmt: skip
    kernel = compiled(
        direction, f"recurrence_{direction}", constants, tile.shared_bytes(hidden, gates, backward), device
    )
    return _Launch(kernel, tile, split, groups, chunks)


def compiled(source: str, name: str, constants: dict[str, int], shared: int, device: int) -> nvrtc.Kernel:
    """The kernel `name` with these constants; loaded once, however many batch sizes use it."""
    return _loaded(source, name, tuple(constants.items()), shared, device)


@functools.cache
def _loaded(source: str, name: str, constants: tuple[tuple[str, int], ...], shared: int, device: int) -> nvrtc.Kernel:
    architecture = f"--gpu-architecture=sm_{limits(device)[2]}"
    options = [architecture, "-std=c++17", *(f"-D{k}={int(v)}" for k, v in constants)]
    return nvrtc.Kernel(_source(source), name, options, shared, device)


@functools.cache
def _conversion(name: str, gates: int, hidden: int, inputs: int, x_kind: int, w_kind: int, device: int) -> nvrtc.Kernel:
    first, width = packed_layout(inputs, hidden)
    constants = {
        "X_KIND": x_kind, "W_KIND": w_kind, "GATES": gates, "HIDDEN": hidden, "INPUTS": inputs, "FIRST_H": first,
        "WIDTH": width,
    }  # fmt: skip
    return compiled("conversions", name, constants, 0, device)


def ready(tensor: Tensor) -> Tensor:
    """Contiguous and aligned for 16-byte accesses."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _state(tensor: Tensor) -> Tensor:
    return ready(tensor if tensor.dtype == torch.float32 else tensor.float())


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def bias_like(bias: Tensor | None, w_ih: Tensor) -> Tensor | None:
    """Of the weights' dtype, as the kernels read it."""
    if bias is None or bias.dtype == w_ih.dtype:
        return None if bias is None else bias.contiguous()
    return bias.to(w_ih.dtype).contiguous()


def forward(
    x: Tensor,
    h0: Tensor,
    carry0: Tensor,
    resets: Tensor | None,
    fill_h: Tensor | None,
    fill_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, h_n, the other final state, and for the backward packed [x | h], gates, saved [T*B, ...] fp16.

    carry0 and the other final state are c for the LSTM; the GRU passes h0 again.
    """
    steps, batch, inputs = x.shape
    rows, hidden, device = steps * batch, w_hh.shape[1], x.get_device()
    gates, first, width = w_hh.shape[0] // hidden, *packed_layout(inputs, hidden)
    kind, w_kind = KIND[x.dtype], KIND[w_ih.dtype]
    fill = fill_h is not None or fill_c is not None
    launch = _recurrence("forward", gates, hidden, batch, kind, w_kind, resets is not None, fill, save, device)
    prepare = _conversion("prepare_forward", gates, hidden, inputs, kind, w_kind, device)
    x, w_ih, w_hh, start = ready(x), ready(w_ih), ready(w_hh), _state(h0)
    carry_start = start if carry0 is h0 else _state(carry0)
    resets = None if resets is None else resets.contiguous()
    b_ih, b_hh = bias_like(b_ih, w_ih), bias_like(b_hh, w_ih)
    if fill:
        fill_h, fill_c = vector(fill_h), vector(fill_c)
    stream = torch._C._cuda_getCurrentRawStream(device)

    half: dict[str, Any] = {"dtype": torch.float16, "device": x.device}
    packed = torch.empty(rows, width, **half)
    w_ih_half = torch.empty(gates * hidden, inputs, **half)
    # fp16 scratch: W_hh, one counter per chunk (4 bytes each) and, without `save`, two slots of h
    counters = gates * hidden * hidden
    slots = counters + 8 * -(-launch.chunks // 4)
    scratch = torch.empty(slots + (0 if save else 2 * batch * hidden), **half)
    base = scratch.data_ptr()
    work = rows * inputs + gates * hidden * (inputs + hidden)
    prepare.launch(
        min(1056, -(-work // (8 * _CONVERSION_THREADS))), _CONVERSION_THREADS,
        struct.pack(
            "8qi0q", x.data_ptr(), packed.data_ptr(), w_ih.data_ptr(), w_ih_half.data_ptr(), w_hh.data_ptr(), base,
            base + 2 * counters, rows, launch.chunks,
        ), stream,
    )  # fmt: skip
    pre = torch.mm(packed.as_strided((rows, inputs), (width, 1)), w_ih_half.t())

    y = torch.empty(steps, batch, hidden, dtype=x.dtype, device=x.device)
    saved = torch.empty((rows, hidden) if save else 0, **half)
    h_n = torch.empty_like(start)
    carry = h_n if gates == 3 else torch.empty_like(start)
    h_in, h_stride = (packed.data_ptr() + 2 * first, width) if save else (base + 2 * slots, hidden)
    launch(
        struct.pack(
            "15q5i0q", pre.data_ptr(), base, address(b_ih), address(b_hh), start.data_ptr(), carry_start.data_ptr(),
            h_n.data_ptr(), carry.data_ptr(), address(resets), address(fill_h), address(fill_c), y.data_ptr(), h_in,
            saved.data_ptr(), base + 2 * counters, h_stride, steps, batch, launch.groups, launch.chunks,
        ), stream,
    )  # fmt: skip
    if h0.dtype != torch.float32 or carry0.dtype != torch.float32:
        h_n, carry = h_n.to(h0.dtype), carry.to(carry0.dtype)
    if not save:
        packed, pre = torch.empty(0, **half), torch.empty(0, **half)
    return y, h_n, carry, packed, pre, saved


def backward(
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    packed: Tensor,
    pre: Tensor,
    saved: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    x_dtype: torch.dtype,
    need_dx: bool,
    fill: bool,
) -> Gradients:
    """All gradients from those of y, h_n and c_n (None where absent) and what `forward` left."""
    batch, hidden = h0.shape
    rows, inputs, device = packed.shape[0], w_ih.shape[1], h0.get_device()
    gates, first, width = w_hh.shape[0] // hidden, *packed_layout(inputs, hidden)
    kind, w_kind = KIND[x_dtype], KIND[w_ih.dtype]
    launch = _recurrence("backward", gates, hidden, batch, kind, w_kind, resets is not None, fill, True, device)
    prepare = _conversion("prepare_backward", gates, hidden, inputs, kind, w_kind, device)
    finish = _conversion("finish_backward", gates, hidden, inputs, kind, w_kind, device)
    dy = None if dy is None else ready(dy)
    dh_n, dc_n = None if dh_n is None else _state(dh_n), None if dc_n is None else _state(dc_n)
    w_ih, w_hh, resets = ready(w_ih), ready(w_hh), None if resets is None else resets.contiguous()
    stream = torch._C._cuda_getCurrentRawStream(device)

    half: dict[str, Any] = {"dtype": torch.float16, "device": h0.device}
    single: dict[str, Any] = {"dtype": torch.float32, "device": h0.device}
    w_ih_half = torch.empty(gates * hidden, inputs, **half)
    # fp32 scratch: maxima, one counter per chunk, partial sums, W_hh transposed (fp16)
    work = rows * hidden + gates * hidden * (inputs + hidden)
    blocks = min(528, -(-work // (8 * _CONVERSION_THREADS)))
    partials = launch.groups * launch.tile.teams * launch.tile.warp_rows
    sizes = (blocks, launch.chunks, partials * 4 * hidden, *((partials * hidden,) * 2 if fill else (0, 0)))
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 4) * 4)
    scratch = torch.empty(offsets[-1] + gates * hidden * hidden // 2, **single)
    maxima, arrivals, bias_sums, fill_h, fill_c, w_t = (scratch.data_ptr() + 4 * o for o in offsets)
    prepare.launch(
        blocks, _CONVERSION_THREADS,
        struct.pack(
            "11qi0q", address(dy), address(dh_n), address(dc_n), maxima, w_ih.data_ptr(), w_ih_half.data_ptr(),
            w_hh.data_ptr(), w_t, arrivals, rows, batch, launch.chunks,
        ), stream,
    )  # fmt: skip

    d_gates = torch.empty(rows, 4 * hidden, **half)
    dh0, carry = torch.empty(batch, hidden, **single), torch.empty(batch, hidden, **single)
    launch(
        struct.pack(
            "16q6i0q", pre.data_ptr(), saved.data_ptr(), packed.data_ptr() + 2 * first, w_t, address(resets),
            address(dy), address(dh_n), address(dc_n), maxima, d_gates.data_ptr(), dh0.data_ptr(), carry.data_ptr(),
            bias_sums, fill_h, fill_c, arrivals, width, rows // batch, batch, launch.groups, launch.chunks, blocks,
        ), stream,
    )  # fmt: skip

    dx = dx_half = None
    if need_dx:
        dx = torch.empty(rows // batch, batch, inputs, dtype=x_dtype, device=h0.device)
        dx_half = torch.mm(d_gates if gates == 4 else d_gates[:, : 3 * hidden], w_ih_half)
    dw = torch.mm(d_gates.t(), packed, out_dtype=torch.float32)
    dw_ih, dw_hh = torch.empty_like(w_ih), torch.empty_like(w_hh)
    db_ih, db_hh = w_ih.new_empty(gates * hidden), w_ih.new_empty(gates * hidden)
    d_fill_h, d_fill_c = (torch.empty(hidden, **single), torch.empty(hidden, **single)) if fill else (None, None)
    work = rows * inputs + 8 * gates * hidden * (inputs + hidden)
    finish.launch(
        min(1056, -(-work // (8 * _CONVERSION_THREADS))), _CONVERSION_THREADS,
        struct.pack(
            "14q2i0q", maxima, address(dx_half), address(dx), dw.data_ptr(), dw_ih.data_ptr(), dw_hh.data_ptr(),
            bias_sums, db_ih.data_ptr(), db_hh.data_ptr(), fill_h if fill else 0, fill_c if fill else 0,
            address(d_fill_h), address(d_fill_c), rows, partials, blocks,
        ), stream,
    )  # fmt: skip
    if h0.dtype != torch.float32:
        dh0, carry = dh0.to(h0.dtype), carry.to(h0.dtype)
    return Gradients(dx, dh0, carry, d_fill_h, d_fill_c, dw_ih, dw_hh, db_ih, db_hh)
