"""Everything about a layer's launches that follows from sizes and dtypes, computed once: kernels, grids, memory.

A plan is a few numbers and functions that take addresses. At the sizes policies have, the host determines how long a
call takes, so a call does nothing that a plan can hold. Offsets are in bytes.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.cuda import tiles
from holdfast.kernels.cuda.cublaslt import product
from holdfast.kernels.cuda.kernels import KIND, compiled, limits
from holdfast.kernels.cuda.nvrtc import Kernel, Launch

_CONVERSION_THREADS = 256
_PLANS = 1024  # sequences of many lengths make many plans; a plan takes about a kilobyte and shares its kernels


class Recurrence(NamedTuple):
    """A recurrence kernel and how to launch it for one batch size."""

    launch: Launch
    chunks: int
    groups: int
    partials: int  # rows of partial sums that the backward writes
    counters: int  # of arrivals
    exchanged: int  # bytes that follow the counters, to the next multiple of 64


@functools.cache
def recurrence(
    direction: str, gates: int, hidden: int, batch: int, kind: int, w_kind: int, resets: bool, reset_values: bool, save: bool,
    device: int, one_step: bool = False, clusters: bool = True,
) -> Recurrence:  # fmt: skip
    backward = direction == "backward"
    processors, shared, capability = limits(device)
    tile = tiles.tile_for(gates, hidden, batch, backward, processors, shared, one_step)
    if tile is None:
        raise ValueError(f"no tile of a recurrence with hidden size {hidden} fits this GPU")
    if not clusters or capability < 90:
        tile = tile._replace(cluster=False)
    split, chunks = tile.split(hidden), -(-batch // tile.rows)
    share = split if tile.cluster and backward else tile.share
    groups = -(-chunks // tile.teams) if split == 1 else min(chunks, processors // split)
    constants = {
        "GRU": gates == 3, "HIDDEN": hidden, "NH": tile.units, "WU": tile.warp_units, "MT": tile.row_tiles,
        "WARP_ROWS": tile.warp_rows, "HALVES": tile.halves, "TEAMS": tile.teams, "STAGES": tile.stages,
        "KC": tile.columns or tile.depth(hidden, gates, backward), "W_REGISTERS": tile.registers, "SAVE": save, "SHARE": share,
        "CLUSTER": tile.cluster, "ONE_CHUNK": tile.cluster or chunks <= groups * tile.teams, "RESETS": resets,
        "RESET_VALUES": reset_values, "Y_KIND": kind, "W_KIND": w_kind,
    }  # fmt: skip
    kernel = compiled(
        direction, f"recurrence_{direction}", constants, tile.shared_bytes(hidden, gates, backward), device
    )
    if tile.cluster:
        groups = -(-chunks // tile.teams)
        if groups > kernel.most_clusters(split, tile.threads):  # a smaller GPU, or a part of one
            return recurrence(
                direction, gates, hidden, batch, kind, w_kind, resets, reset_values, save, device, one_step, clusters=False
            )  # fmt: skip
    together = split > 1 and not tile.cluster
    launch = kernel.launcher(split * groups, tile.threads, "16q6i0q" if backward else "15q5i0q", together)
    sets = split // share if share > 1 and not tile.cluster else 0
    counters = chunks * (1 + sets)
    exchanged = 4 * chunks * tile.rows * split * tile.units * share if sets else 0
    return Recurrence(launch, chunks, groups, groups * tile.teams * tile.warp_rows, counters, exchanged)


def _conversion(name: str, gates: int, hidden: int, inputs: int, x_kind: int, w_kind: int, device: int) -> Kernel:
    first, width = packed_layout(inputs, hidden)
    constants = {
        "X_KIND": x_kind, "W_KIND": w_kind, "GATES": gates, "HIDDEN": hidden, "INPUTS": inputs, "FIRST_H": first,
        "WIDTH": width,
    }  # fmt: skip
    return compiled("conversions", name, constants, 0, device)


def _blocks(elements: int, most: int) -> int:
    return min(most, -(-elements // (8 * _CONVERSION_THREADS)))


def _offsets(*sizes: int) -> list[int]:
    """The offsets of parts of these sizes, each a multiple of 256 bytes; the total comes last."""
    return [0, *itertools.accumulate(-(-size // 256) * 256 for size in sizes)]


class ForwardPlan(NamedTuple):
    prepare: Launch
    project: Launch
    recur: Launch
    kept: int  # elements of the tensor kept for the backward, 0 without `save`
    scratch: int  # bytes that only this call needs
    w_hh: int  # offsets in the scratch memory, which starts with W_ih
    workspace: int
    arrivals: int
    packed: int  # without `save` [x | h], gates and two slots of h are scratch too
    slots: int
    gates: int  # offsets from the packed operand
    saved: int
    h_in: int
    width: int
    rows: int
    chunks: int
    groups: int


@functools.lru_cache(_PLANS)
def forward_plan(
    gate_rows: int, hidden: int, inputs: int, steps: int, batch: int, dtype: torch.dtype, w_dtype: torch.dtype,
    resets: bool, reset_values: bool, save: bool, device: int,
) -> ForwardPlan:  # fmt: skip
    gates, rows, kind, w_kind = gate_rows // hidden, steps * batch, KIND[dtype], KIND[w_dtype]
    launch, chunks, groups, *_ = recurrence(
        "forward", gates, hidden, batch, kind, w_kind, resets, reset_values, save, device, steps == 1
    )
    first, width = packed_layout(inputs, hidden)
    gates_at, saved_at, total = kept_layout(rows, inputs, hidden, gates)
    # A step must compute what a sequence does, so a row's sums must not depend on the number of rows.
    project = product(rows, gate_rows, inputs, (width, inputs, gate_rows), device, transposed="b", in_parts=False)
    w_hh, workspace, arrivals, packed, slots, scratch = _offsets(
        2 * gate_rows * inputs, 2 * gate_rows * hidden, project.workspace, 4 * chunks, 0 if save else 2 * saved_at,
        0 if save else 4 * batch * hidden,
    )[1:]  # fmt: skip
    prepare = _conversion("prepare_forward", gates, hidden, inputs, kind, w_kind, device)
    blocks = _blocks(rows * inputs + gate_rows * (inputs + hidden), 1056)
    return ForwardPlan(
        prepare=prepare.launcher(blocks, _CONVERSION_THREADS, "8qi0q"), project=project.run, recur=launch,
        kept=total if save else 0, scratch=scratch, w_hh=w_hh, workspace=workspace, arrivals=arrivals, packed=packed,
        slots=slots, gates=2 * gates_at, saved=2 * saved_at, h_in=2 * first, width=width, rows=rows, chunks=chunks,
        groups=groups,
    )  # fmt: skip


class BackwardPlan(NamedTuple):
    prepare: Launch
    recur: Launch
    inputs_product: Launch
    weights_product: Launch
    finish: Launch
    scratch: int  # bytes that only this call needs; next, offsets in it, after W_ih at 0
    w_t: int
    workspace: int
    maxima: int
    factor: int  # of the product that makes dx
    arrivals: int
    bias_sums: int
    reset_h: int
    reset_c: int
    d_gates: int
    dx: int  # where the scaled dx goes in fp16; 0 if the product writes dx itself
    dw: int
    dh0: int
    dc0: int
    gates: int  # offsets in the tensor that the forward kept
    saved: int
    h_in: int
    width: int
    steps: int
    rows: int
    chunks: int
    groups: int
    partials: int
    counters: int
    blocks: int


@functools.lru_cache(_PLANS)
def backward_plan(
    gate_rows: int, hidden: int, inputs: int, kept: int, batch: int, dtype: torch.dtype, w_dtype: torch.dtype,
    resets: bool, reset_values: bool, need_dx: bool, device: int,
) -> BackwardPlan:  # fmt: skip
    gates, kind, w_kind = gate_rows // hidden, KIND[dtype], KIND[w_dtype]
    rows = kept // kept_layout(1, inputs, hidden, gates)[2]
    launch, chunks, groups, partials, counters, exchanged = recurrence(
        "backward", gates, hidden, batch, kind, w_kind, resets, reset_values, True, device
    )
    first, width = packed_layout(inputs, hidden)
    gates_at, saved_at, _ = kept_layout(rows, inputs, hidden, gates)
    blocks = _blocks(rows * hidden + gate_rows * (inputs + hidden), 528)
    reset_sums = 4 * partials * hidden if reset_values else 0
    converted = dtype == torch.bfloat16  # a product of fp16 cannot write it
    inputs_product = product(
        rows, inputs, gate_rows, (4 * hidden, inputs, inputs), device, result=torch.float16 if converted else dtype,
        scaled=not converted,
    )  # fmt: skip
    weights_product = product(
        4 * hidden, width, rows, (4 * hidden, width, width), device, transposed="a", result=torch.float32
    )
    workspace_size = max(inputs_product.workspace, weights_product.workspace)
    parts = _offsets(
        2 * gate_rows * inputs, 2 * gate_rows * hidden, workspace_size, 4 * (blocks + 2), -(-counters // 64) * 256 + exchanged,
        16 * partials * hidden, reset_sums, reset_sums, 8 * rows * hidden, 2 * rows * inputs if need_dx and converted else 0,
        16 * hidden * width, 4 * batch * hidden, 4 * batch * hidden,
    )  # fmt: skip
    prepare, finish = (
        _conversion(name, gates, hidden, inputs, kind, w_kind, device)
        for name in ("prepare_backward", "finish_backward")
    )
    finish_blocks = _blocks((rows * inputs if converted else 0) + 8 * gate_rows * (inputs + hidden), 1056)
    w_t, workspace, maxima, arrivals, bias_sums, reset_h, reset_c, d_gates, dx, dw, dh0, dc0, scratch = parts[1:]
    return BackwardPlan(
        prepare=prepare.launcher(blocks, _CONVERSION_THREADS, "11qi0q"), recur=launch,
        inputs_product=inputs_product.run, weights_product=weights_product.run,
        finish=finish.launcher(finish_blocks, _CONVERSION_THREADS, "14q2i0q"),
        scratch=scratch, w_t=w_t, workspace=workspace, maxima=maxima, factor=maxima + 4 * blocks, arrivals=arrivals,
        bias_sums=bias_sums, reset_h=reset_h, reset_c=reset_c, d_gates=d_gates, dx=dx if converted else 0, dw=dw, dh0=dh0,
        dc0=dc0,
        gates=2 * gates_at, saved=2 * saved_at, h_in=2 * first, width=width,
        steps=rows // batch, rows=rows, chunks=chunks, groups=groups, partials=partials, counters=counters,
        blocks=blocks,
    )  # fmt: skip


# --- what a forward keeps --------------------------------------------------------------------------------------------
# The layout of what a forward keeps for its backward: fp16 tensors.
#
# Before the recurrence the inputs become fp16 and are projected to gate pre-activations in one product. After its backward
# the gate gradients, scaled into fp16's range by a power of two, give dx and all weight gradients.
#
# fp16 keeps 11 significant bits, as TF32 does. Inputs beyond 65,504 saturate (they would saturate the gates too), and
# inputs below 6e-5 lose relative precision. Gradients have no natural range, so they are scaled: the largest incoming
# gradient becomes about 1/16, which leaves a factor of a million for growth on the way back through time.


class Saved(NamedTuple):
    """What a backward gets from its forward."""

    kept: Tensor  # fp16, see `kept_layout`
    mask: Tensor | None  # resets [T, B]
    w_ih: Tensor
    w_hh: Tensor
    batch: int
    state_dtype: torch.dtype
    x_dtype: torch.dtype


def packed_layout(inputs: int, hidden: int) -> tuple[int, int]:
    """(first column of h, row width) of the packed operand [x | h]: multiples of 8, for 16-byte rows."""
    first = -(-inputs // 8) * 8
    return first, first + -(-hidden // 8) * 8


def kept_layout(rows: int, inputs: int, hidden: int, gates: int) -> tuple[int, int, int]:
    """The fp16 tensor that a forward keeps for the backward: packed [rows, width], gates [rows, gates * H] and one more
    value per unit [rows, H]. Returns the first element of the gates and of the values, and the number of elements."""
    width = packed_layout(inputs, hidden)[1]
    return rows * width, rows * (width + gates * hidden), rows * (width + (gates + 1) * hidden)
