"""An encoder's first layer in Triton: observations to features, activation(W x + b), and the gradients of W and b.

x is built in the kernel: a one-hot row from whole numbers, or a vector, normalized or not. So observations are read where
the rollout left them (row t, column `columns[i]` of [T, B]), features are written once, and the backward reads nothing but
their gradient: it computes the features again. `policies/encoders.py` says what is computed.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.triton.elements import tanh
from holdfast.kernels.triton.outputs import sum_partials
from holdfast.kernels.triton.tiles import padded, programs_for

ACTIVATIONS = {"tanh": 0, "relu": 1}  # ACTIVATION in the kernels
LARGEST_INPUTS = 64


@triton.jit
def load_input(
    obs, at, ok, part, choice, mean, var, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, ONE_HOT: tl.constexpr
):
    """[BLOCK, DP] fp32. Column d of a one-hot row is whether number `part[d]` of the observation is `choice[d]`."""
    d = tl.arange(0, DP)[None, :]
    inside = ok[:, None] & (d < D)
    if ONE_HOT:
        which = tl.load(part + d, mask=d < D, other=0)
        number = tl.load(obs + at[:, None] * PARTS + which, mask=inside, other=0)
        x = tl.where(inside & (number == tl.load(choice + d, mask=d < D, other=0)), 1.0, 0.0)
    else:
        x = tl.load(obs + at[:, None] * D + d, mask=inside, other=0.0).to(tl.float32)
        if mean is not None:
            x = x - tl.load(mean + d, mask=d < D, other=0.0)
            x = x * tl.rsqrt(tl.load(var + d, mask=d < D, other=1.0) + 1e-8)
            x = tl.where(x > 10.0, 10.0, tl.where(x < -10.0, -10.0, x))  # keeps a NaN
    return x


@triton.jit
def load_weight(w, b, D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr):
    """W transposed [DP, FP], b [1, FP]."""
    d, f = tl.arange(0, DP)[:, None], tl.arange(0, FP)[None, :]
    return tl.load(w + f * D + d, mask=(d < D) & (f < F), other=0.0), tl.load(b + f, mask=f < F, other=0.0)


@triton.jit
def position(row, ok, columns, size, batch):
    """Where rows of a minibatch are in the rollout."""
    column = row % size
    if columns is not None:
        column = tl.load(columns + column, mask=ok, other=0).to(tl.int32)
    return (row // size).to(tl.int64) * batch + column


@triton.jit(do_not_specialize=["rows", "size", "batch"])
def forward_kernel(
    obs, part, choice, mean, var, w, b, columns, features, rows, size, batch,
    D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, ONE_HOT: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    f = tl.arange(0, FP)[None, :]
    weight, bias = load_weight(w, b, D, DP, F, FP)
    for first in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        ok = row < rows
        at = position(row, ok, columns, size, batch)
        x = load_input(obs, at, ok, part, choice, mean, var, D, DP, PARTS, ONE_HOT)
        out = tl.dot(x, weight, input_precision=PRECISION) + bias
        out = tanh(out) if ACTIVATION == 0 else tl.where(out < 0.0, 0.0, out)
        tl.store(features + row.to(tl.int64)[:, None] * F + f, out, mask=ok[:, None] & (f < F))


@triton.jit(do_not_specialize=["rows", "size", "batch"])
def backward_kernel(
    obs, part, choice, mean, var, w, b, columns, d_features, partials, rows, size, batch,
    D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, ONE_HOT: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partials [programs, F * D + F]: the sums of each program, W [F, D] and b."""
    f = tl.arange(0, FP)[None, :]
    weight, bias = load_weight(w, b, D, DP, F, FP)
    d_w = tl.zeros([DP, FP], tl.float32)
    d_b = tl.zeros([BLOCK, FP], tl.float32)
    for first in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        ok = row < rows
        at = position(row, ok, columns, size, batch)
        x = load_input(obs, at, ok, part, choice, mean, var, D, DP, PARTS, ONE_HOT)
        given = tl.load(d_features + row.to(tl.int64)[:, None] * F + f, mask=ok[:, None] & (f < F), other=0.0)
        out = tl.dot(x, weight, input_precision=PRECISION) + bias
        if ACTIVATION == 0:
            y = tanh(out)
            d_out = given * (1.0 - y * y)
        else:
            d_out = tl.where(out > 0.0, given, 0.0)
        d_b += d_out
        d_w += tl.dot(tl.trans(x), d_out, input_precision=PRECISION)
    mine = partials + tl.program_id(0).to(tl.int64) * (F * D + F)
    d, unit = tl.arange(0, DP)[:, None], tl.arange(0, FP)
    tl.store(mine + f * D + d, d_w, mask=(d < D) & (f < F))
    tl.store(mine + F * D + unit, tl.sum(d_b, 0), mask=unit < F)


class FirstLayer(NamedTuple):
    """How observations become inputs, and the activation. part, choice: of one-hot rows; mean, var: of normalized vectors."""

    inputs: int
    activation: str
    numbers: int = 1  # in an observation
    part: Tensor | None = None  # [inputs] int32
    choice: Tensor | None = None  # [inputs], of the observations' dtype
    mean: Tensor | None = None  # [inputs]
    var: Tensor | None = None

    def features(
        self, obs: Tensor, columns: Tensor | None, weight: Tensor, bias: Tensor, *, block: int = 64, warps: int = 4,
        precision: str = "tf32x3", per_processor: int = 8,
    ) -> Tensor:  # fmt: skip
        """Features [T, columns, F] of observations [T, B, ...]; columns None: all."""
        steps, batch = obs.shape[:2]
        size = batch if columns is None else columns.numel()
        features = torch.empty(steps, size, weight.shape[0], dtype=torch.float32, device=obs.device)
        programs = programs_for(steps * size, block, obs.device, per_processor)
        forward_kernel[(programs,)](
            obs, self.part, self.choice, self.mean, self.var, weight, bias, columns, features, steps * size, size, batch,
            num_warps=warps, **self._sizes(weight, block, precision),
        )  # fmt: skip
        return features

    def gradients(
        self, obs: Tensor, columns: Tensor | None, weight: Tensor, bias: Tensor, d_features: Tensor, *, block: int = 64,
        warps: int = 4, precision: str = "tf32x3", per_processor: int = 4,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Of weight and bias, from those of the features."""
        steps, batch = obs.shape[:2]
        size = batch if columns is None else columns.numel()
        programs = programs_for(steps * size, block, obs.device, per_processor)
        parts = (weight.numel(), bias.numel())
        partials = torch.empty(programs, sum(parts), dtype=torch.float32, device=obs.device)
        flat = torch.empty(sum(parts), dtype=torch.float32, device=obs.device)
        backward_kernel[(programs,)](
            obs, self.part, self.choice, self.mean, self.var, weight, bias, columns, d_features, partials, steps * size,
            size, batch, num_warps=warps, **self._sizes(weight, block, precision),
        )  # fmt: skip
        sum_partials(partials, flat)
        d_weight, d_bias = flat.split(parts)
        return d_weight.view_as(weight), d_bias

    def _sizes(self, weight: Tensor, block: int, precision: str) -> dict[str, Any]:
        features = weight.shape[0]
        return dict(
            D=self.inputs, DP=padded(self.inputs), PARTS=self.numbers, ONE_HOT=self.part is not None, F=features,
            FP=padded(features), ACTIVATION=ACTIVATIONS[self.activation], BLOCK=block, PRECISION=precision,
        )  # fmt: skip
