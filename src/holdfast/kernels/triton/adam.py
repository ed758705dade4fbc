"""Clipping by the norm of all gradients and Adam's step, two launches for all parameters together, in Triton.

`torch.optim.Adam` owns the moments and step counts; these kernels read and write its tensors through a table of addresses, so
parameters and gradients may lie anywhere. A norm or loss that is not finite changes nothing. Sums are of fixed order.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024  # elements of one program
METRICS = 7  # of `algorithms.ppo.MinibatchMetrics`

_TABLE = ("parameter", "gradient", "mean", "square", "step")  # rows of the table of addresses


@triton.jit
def pointer(table, row, count, owner):
    return tl.load(table + row * count + owner).to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["count"])
def norm_kernel(table, sizes, owners, firsts, squares, steps_before, count, BLOCK: tl.constexpr):
    """The sum of squares of each chunk, and a copy of the step counts."""
    chunk = tl.program_id(0)
    owner, first = tl.load(owners + chunk), tl.load(firsts + chunk)
    i = first + tl.arange(0, BLOCK)
    g = tl.load(pointer(table, 1, count, owner) + i, mask=i < tl.load(sizes + owner), other=0.0)
    tl.store(squares + chunk, tl.sum(g * g, 0))
    if first == 0:
        tl.store(steps_before + owner, tl.load(pointer(table, 4, count, owner)))


@triton.jit(do_not_specialize=["count", "chunks"])
def adam_kernel(
    table, sizes, owners, firsts, squares, steps_before, metrics, weight, entropy_coef, rate, result, count,
    chunks, eps, max_norm, value_coef,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    owner, first = tl.load(owners + chunk), tl.load(firsts + chunk)
    i = first + tl.arange(0, BLOCK)
    ok = i < tl.load(sizes + owner)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, chunks, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        total += tl.load(squares + j, mask=j < chunks, other=0.0)
    norm = tl.sqrt(tl.sum(total, 0))
    each = tl.load(weight)
    policy_loss, value_loss = tl.load(metrics) * each, tl.load(metrics + 1) * each
    entropy, kl, clipped = tl.load(metrics + 2) * each, tl.load(metrics + 3) * each, tl.load(metrics + 4) * each
    # inf - inf and 0 * inf are NaN: both tell a finite number from any other.
    loss = policy_loss + value_coef * value_loss - tl.load(entropy_coef) * entropy
    finite = ((norm - norm) == 0.0) & ((loss - loss) == 0.0)

    parameter, mean, square = (
        pointer(table, 0, count, owner) + i,
        pointer(table, 2, count, owner) + i,
        pointer(table, 3, count, owner) + i,
    )
    step = tl.load(steps_before + owner) + 1.0
    scale = tl.maximum(norm / max_norm, 1.0)
    g = tl.load(pointer(table, 1, count, owner) + i, mask=ok, other=0.0) / scale
    p_before, m_before = tl.load(parameter, mask=ok, other=0.0), tl.load(mean, mask=ok, other=0.0)
    v_before = tl.load(square, mask=ok, other=0.0)
    m = BETA1 * m_before + (1.0 - BETA1) * g
    v = BETA2 * v_before + (1.0 - BETA2) * g * g
    # In float64: 1 - 0.999 in float32 has lost four digits.
    correction1 = (1.0 - tl.exp(step.to(tl.float64) * LOG_BETA1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(step.to(tl.float64) * LOG_BETA2)).to(tl.float32)
    change = (tl.load(rate) / correction1) * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    tl.store(parameter, tl.where(finite, p_before - change, p_before), mask=ok)
    tl.store(mean, tl.where(finite, m, m_before), mask=ok)
    tl.store(square, tl.where(finite, v, v_before), mask=ok)
    if first == 0:
        moves = finite & (tl.load(sizes + owner) > 0)
        tl.store(pointer(table, 4, count, owner), tl.where(moves, step, step - 1.0))
    if chunk == 0:
        tl.store(result, tl.where(finite, policy_loss, 0.0))
        tl.store(result + 1, tl.where(finite, value_loss, 0.0))
        tl.store(result + 2, tl.where(finite, entropy, 0.0))
        tl.store(result + 3, tl.where(finite, norm, 0.0))
        tl.store(result + 4, tl.where(finite, kl, 0.0))
        tl.store(result + 5, tl.where(finite, clipped, 0.0))
        tl.store(result + 6, tl.where(finite, 0.0, 1.0))


class ClippedAdam:
    """Steps a `torch.optim.Adam` whose rate is a tensor, for float32 parameters. `find` the tensors before the first step, and
    again when gradients have moved."""

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self.optimizer, self.max_norm = optimizer, max_norm
        (group,) = optimizer.param_groups
        self.parameters: list[Tensor] = group["params"]
        device = self.parameters[0].device
        sizes = [p.numel() for p in self.parameters]
        owners = [i for i, size in enumerate(sizes) for _ in range(0, size, CHUNK)]
        firsts = [first for size in sizes for first in range(0, size, CHUNK)]
        self._sizes, self._owners, self._firsts = (
            torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (sizes, owners, firsts)
        )
        self._table = torch.zeros(len(_TABLE), len(sizes), dtype=torch.int64, device=device)
        self._squares = torch.empty(len(owners), device=device)
        self._steps_before = torch.empty(len(sizes), device=device)

    def find(self) -> None:
        """Look up where parameters, gradients and the optimizer's state are; makes that state if there is none yet."""
        rows: Sequence[list[int]] = [[] for _ in _TABLE]
        for p in self.parameters:
            state = self.optimizer.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            for row, tensor in zip(rows, (p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])):
                if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_contiguous()):
                    raise ValueError("parameters, gradients and moments must be contiguous float32 tensors")
                row.append(0 if tensor is None else tensor.data_ptr())
        self._table.copy_(torch.tensor(rows, dtype=torch.int64))
        sizes = [0 if p.grad is None else p.numel() for p in self.parameters]  # without a gradient no step
        self._sizes.copy_(torch.tensor(sizes, dtype=torch.int32))

    def step(self, metrics: Tensor, weight: Tensor, entropy_coef: Tensor, value_coef: float) -> Tensor:
        """One step; metrics: sums over steps as `outputs.loss_and_gradients` gives them, weight: of one step. Returns
        `MinibatchMetrics` as a tensor."""
        group, count, chunks = self.optimizer.param_groups[0], len(self.parameters), self._owners.numel()
        result = torch.empty(METRICS, device=self._table.device)
        shared = (self._table, self._sizes, self._owners, self._firsts, self._squares, self._steps_before)
        norm_kernel[(chunks,)](*shared, count, BLOCK=CHUNK, num_warps=4)
        beta1, beta2 = group["betas"]
        adam_kernel[(chunks,)](
            *shared, metrics, weight, entropy_coef, group["lr"], result, count, chunks, group["eps"], self.max_norm,
            value_coef, BETA1=beta1, BETA2=beta2, LOG_BETA1=math.log(beta1), LOG_BETA2=math.log(beta2), BLOCK=CHUNK,
            num_warps=4,
        )  # fmt: skip
        return result
