"""An encoder's first layer in Triton: observations to features, activation(W x + b), and the gradients of W and b.

x is built in the kernel: a one-hot row from whole numbers, or a vector, normalized or not, or two of these side by side (an
observation and the action before it). So observations are read where the rollout left them (row t, column `columns[i]` of
[T, B]), features are written once, and the backward reads nothing but their gradient: it computes the features again.
`policies/encoders.py` says what is computed.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from holdfast.kernels.triton.sums import sum_rows
from holdfast.kernels.triton.tiles import Tile, padded, programs_for

ACTIVATIONS = {"tanh": 0, "relu": 1}  # ACTIVATION in the kernels
FEW = 8  # inputs up to which sums are faster than tensor cores

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def tanh_by_sigmoid(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def tanh(x):
    """As torch computes it on a GPU, bit for bit; the interpreter does not know libdevice."""
    if INTERPRETED:
        y = tanh_by_sigmoid(x)
    else:
        y = libdevice.tanh(x)
    return y


@triton.jit
def load_one(obs, at, ok, part, choice, shift, scale, d, D: tl.constexpr, PARTS: tl.constexpr, ONE_HOT: tl.constexpr):
    """Column d of a part of the input, [BLOCK] fp32."""
    if ONE_HOT:
        number = tl.load(obs + at * PARTS + tl.load(part + d), mask=ok, other=0)
        x = tl.where(ok & (number == tl.load(choice + d)), 1.0, 0.0)
    else:
        x = tl.load(obs + at * D + d, mask=ok, other=0.0).to(tl.float32)
        if shift is not None:
            x = (x - tl.load(shift + d)) * tl.load(scale + d)
            x = tl.where(x > 10.0, 10.0, tl.where(x < -10.0, -10.0, x))  # keeps a NaN
    return x


@triton.jit
def add_part(
    out, obs, at, ok, part, choice, shift, scale, w, FIRST: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    ONE_HOT: tl.constexpr, INPUTS: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
):  # fmt: skip
    """out plus W times a part of the input, the D columns from FIRST on: sums in the order of the inputs."""
    f = tl.arange(0, FP)[None, :]
    for d in range(D):
        x = load_one(obs, at, ok, part, choice, shift, scale, d, D, PARTS, ONE_HOT)
        out += x[:, None] * tl.load(w + f * INPUTS + FIRST + d, mask=f < F, other=0.0)
    return out


@triton.jit
def load_part(
    obs, at, ok, part, choice, shift, scale, FIRST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr,
    ONE_HOT: tl.constexpr,
):  # fmt: skip
    """The D columns from FIRST on, [BLOCK, DP] fp32; 0 in the others. Column d of a one-hot row is whether number `part[d]` of
    the observation is `choice[d]`."""
    d = tl.arange(0, DP)[None, :] - FIRST
    mine = (d >= 0) & (d < D)
    inside = ok[:, None] & mine
    if ONE_HOT:
        which = tl.load(part + d, mask=mine, other=0)
        number = tl.load(obs + at[:, None] * PARTS + which, mask=inside, other=0)
        x = tl.where(inside & (number == tl.load(choice + d, mask=mine, other=0)), 1.0, 0.0)
    else:
        x = tl.load(obs + at[:, None] * D + d, mask=inside, other=0.0).to(tl.float32)
        if shift is not None:
            x = x - tl.load(shift + d, mask=mine, other=0.0)
            x = x * tl.load(scale + d, mask=mine, other=0.0)
            x = tl.where(x > 10.0, 10.0, tl.where(x < -10.0, -10.0, x))  # keeps a NaN
    return x


@triton.jit
def position(row, ok, columns, size, batch):
    """Where rows of a minibatch are in the rollout."""
    column = row % size
    if columns is not None:
        column = tl.load(columns + column, mask=ok, other=0).to(tl.int32)
    return (row // size).to(tl.int64) * batch + column


@triton.jit(do_not_specialize=["rows", "size", "batch"])
def forward_kernel(
    obs, part, choice, shift, scale, obs2, part2, choice2, shift2, scale2, w, b, columns, features, rows, size, batch,
    D: tl.constexpr, PARTS: tl.constexpr, ONE_HOT: tl.constexpr, D2: tl.constexpr, PARTS2: tl.constexpr,
    ONE_HOT2: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    f = tl.arange(0, FP)[None, :]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < rows
    at = position(row, ok, columns, size, batch)
    out = tl.zeros([BLOCK, FP], tl.float32)
    out = add_part(out, obs, at, ok, part, choice, shift, scale, w, 0, D, PARTS, ONE_HOT, D + D2, F, FP)
    if D2 > 0:
        out = add_part(out, obs2, at, ok, part2, choice2, shift2, scale2, w, D, D2, PARTS2, ONE_HOT2, D + D2, F, FP)
    out += tl.load(b + f, mask=f < F, other=0.0)
    out = tanh(out) if ACTIVATION == 0 else tl.where(out < 0.0, 0.0, out)
    tl.store(features + row.to(tl.int64)[:, None] * F + f, out, mask=ok[:, None] & (f < F))


@triton.jit
def load_weight(w, b, D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr):
    """W transposed [DP, FP], b [1, FP]."""
    d, f = tl.arange(0, DP)[:, None], tl.arange(0, FP)[None, :]
    return tl.load(w + f * D + d, mask=(d < D) & (f < F), other=0.0), tl.load(b + f, mask=f < F, other=0.0)


@triton.jit(do_not_specialize=["rows", "size", "batch"])
def backward_kernel(
    obs, part, choice, shift, scale, obs2, part2, choice2, shift2, scale2, w, b, columns, d_features, partials, rows, size,
    batch,
    D: tl.constexpr, PARTS: tl.constexpr, ONE_HOT: tl.constexpr, D2: tl.constexpr, PARTS2: tl.constexpr,
    ONE_HOT2: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, ACTIVATION: tl.constexpr,
    FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partials [programs, F * inputs + F]: the sums of each program, W [F, inputs] and b."""
    INPUTS: tl.constexpr = D + D2
    f = tl.arange(0, FP)[None, :]
    weight, bias = load_weight(w, b, INPUTS, DP, F, FP)
    d_w = tl.zeros([DP, FP], tl.float32)
    d_b = tl.zeros([BLOCK, FP], tl.float32)
    for first in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        ok = row < rows
        at = position(row, ok, columns, size, batch)
        x = load_part(obs, at, ok, part, choice, shift, scale, 0, D, DP, PARTS, ONE_HOT)
        if D2 > 0:
            x += load_part(obs2, at, ok, part2, choice2, shift2, scale2, D, D2, DP, PARTS2, ONE_HOT2)
        given = tl.load(d_features + row.to(tl.int64)[:, None] * F + f, mask=ok[:, None] & (f < F), other=0.0)
        if FEW:
            out = tl.sum(x[:, :, None] * weight[None, :, :], 1) + bias
        else:
            out = tl.dot(x, weight, input_precision="tf32x3") + bias
        if ACTIVATION == 0:
            y = tanh_by_sigmoid(out)
            d_out = given * (1.0 - y * y)
        else:
            d_out = tl.where(out > 0.0, given, 0.0)
        d_b += d_out
        if FEW:
            d_w += tl.sum(x[:, :, None] * d_out[:, None, :], 0)
        else:
            d_w += tl.dot(tl.trans(x), d_out, input_precision="tf32x3")
    mine = partials + tl.program_id(0).to(tl.int64) * (F * INPUTS + F)
    d, unit = tl.arange(0, DP)[:, None], tl.arange(0, FP)
    tl.store(mine + f * INPUTS + d, d_w, mask=(d < INPUTS) & (f < F))
    tl.store(mine + F * INPUTS + unit, tl.sum(d_b, 0), mask=unit < F)


class Part(NamedTuple):
    """How one tensor of an observation becomes inputs. part, choice: of one-hot rows; shift, scale: of normalized vectors."""

    inputs: int
    numbers: int = 1  # in an observation
    part: Tensor | None = None  # [inputs] int32
    choice: Tensor | None = None  # [inputs] int32
    shift: Tensor | None = None  # [inputs]
    scale: Tensor | None = None


_NO_PART = Part(0, 0)


class FirstLayer(NamedTuple):
    """The parts of an observation, one or two, in the order of their inputs, and the activation."""

    parts: tuple[Part, ...]
    activation: str

    @property
    def inputs(self) -> int:
        return sum(part.inputs for part in self.parts)

    def features(
        self, obs: Sequence[Tensor], columns: Tensor | None, weight: Tensor, bias: Tensor, tile: Tile | None = None
    ) -> Tensor:  # fmt: skip
        """Features [T, columns, F] of observations [T, B, ...], a tensor for each part; columns None: all."""
        tile = tile or (Tile(4, 1) if self.inputs <= FEW else Tile(16, 2))
        steps, batch = obs[0].shape[:2]
        size = batch if columns is None else columns.numel()
        features = torch.empty(steps, size, weight.shape[0], dtype=torch.float32, device=weight.device)
        forward_kernel[(triton.cdiv(steps * size, tile.rows),)](
            *self._read(obs), weight, bias, columns, features, steps * size, size, batch, **self._sizes(weight, tile)
        )  # fmt: skip
        return features

    def gradients(
        self, obs: Sequence[Tensor], columns: Tensor | None, weight: Tensor, bias: Tensor, d_features: Tensor,
        tile: Tile | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Of weight and bias, from those of the features."""
        few = self.inputs <= FEW
        tile = tile or (Tile(8, 1, 8) if few else Tile(64, 4, 4))
        tile = tile.for_sums() if few else tile
        steps, batch = obs[0].shape[:2]
        size = batch if columns is None else columns.numel()
        programs = programs_for(steps * size, tile.rows, weight.device, tile.per_processor)
        parts = (weight.numel(), bias.numel())
        partials = torch.empty(programs, sum(parts), dtype=torch.float32, device=weight.device)
        backward_kernel[(programs,)](
            *self._read(obs), weight, bias, columns, d_features, partials, steps * size, size, batch,
            DP=padded(self.inputs, 2 if few else 16), FEW=few, **self._sizes(weight, tile),
        )  # fmt: skip
        d_weight, d_bias = sum_rows(partials).split(parts)
        return d_weight.view_as(weight), d_bias

    def _read(self, obs: Sequence[Tensor]) -> list[Tensor | None]:
        """What the kernels read: of each part the tensor, and what it means."""
        if len(obs) != len(self.parts):
            raise ValueError(f"{len(obs)} tensors of observations came, expected {len(self.parts)}")
        read: list[Tensor | None] = []
        for tensor, part in zip(obs, self.parts):
            read += [tensor, *part[2:]]
        return read + [None] * (10 - len(read))

    def _sizes(self, weight: Tensor, tile: Tile) -> dict[str, Any]:
        features = weight.shape[0]
        first, second = self.parts if len(self.parts) == 2 else (self.parts[0], _NO_PART)
        return dict(
            D=first.inputs, PARTS=first.numbers, ONE_HOT=first.part is not None, D2=second.inputs, PARTS2=second.numbers,
            ONE_HOT2=second.part is not None, F=features, FP=padded(features), ACTIVATION=ACTIVATIONS[self.activation],
            BLOCK=tile.rows, num_warps=tile.warps,
        )  # fmt: skip
