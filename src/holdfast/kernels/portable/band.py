"""Attention in a band: each query sees itself and a bounded number of steps before it. With its backward, in blocks.

    A block of C queries sees R + C keys (R: steps before the first query):     R | C | C | C ...
    T queries cost T x (R + C) scores, not T x (R + T).                         \\____/            block 0
                                                                                    \\____/        block 1

Everything here is finite; `window.py` takes care of what is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from holdfast.checks import is_rewritten
from holdfast.kernels.autocast import without_autocast
from holdfast.kernels.operands import refuse_second_derivative

_FILLS_A_GPU = 2**21
"""Scores of a block from which on it is the arithmetic that takes the time."""


def attend_in_band(q: Tensor, k: Tensor, v: Tensor, reach: Tensor, bias: Tensor) -> Tensor:
    """q [B, h, T, d]; k, v [B, h, R + T, d]; reach [B, T], how far back each query sees; bias [h, R + 1] by distance.

    Returns [B, h, T, d].
    """
    B, heads, _, size = q.shape
    q, k, v = (part.flatten(0, 1) for part in (q * size**-0.5, k, v))
    attend: Any = _attend if is_rewritten() or forward_ad._current_level >= 0 else _Band.apply
    return attend(q, k, v, reach, bias).unflatten(0, (B, heads))


def _attend(q: Tensor, k: Tensor, v: Tensor, reach: Tensor, bias: Tensor) -> Tensor:
    """What `_Band` computes, in one block and by plain operations: torch.func and traces take nothing else."""
    R = bias.shape[1] - 1
    distance = _distances(q.shape[1], R, reach)
    hidden = (distance > reach.unsqueeze(2)) | (distance < 0)  # [B, T, R + T]
    scores = torch.bmm(q, k.transpose(1, 2)).unflatten(0, (-1, bias.shape[0])) + bias[:, distance.clamp(0, R)]
    weights = scores.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1).flatten(0, 1)
    return torch.bmm(weights, v)


class _Band(torch.autograd.Function):
    """q [N, T, d], k, v [N, R + T, d] with N = B x h -> [N, T, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, reach: Tensor, bias: Tensor) -> Tensor:
        R = bias.shape[1] - 1
        y, blocks = torch.empty_like(q), []
        for a, b in _blocks(q, R):
            scores = torch.bmm(q[:, a:b], k[:, a : R + b].transpose(1, 2))  # [N, n, R + n]
            by_head = scores.view(reach.shape[0], bias.shape[0], *scores.shape[1:])
            distance = _distances(b - a, R, reach)
            by_head += bias[:, distance.clamp(0, R)]
            hidden = (distance > reach[:, a:b].unsqueeze(2)) | (distance < 0)  # [B, n, R + n]
            weights = by_head.masked_fill_(hidden.unsqueeze(1), -torch.inf).softmax(-1).view_as(scores)
            y[:, a:b] = torch.bmm(weights, v[:, a : R + b])
            blocks.append(weights)
        ctx.save_for_backward(q, k, v, *blocks)
        ctx.heads, ctx.slots = bias.shape[0], R
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        with without_autocast(gradients[0].device):
            return _gradients(ctx, *gradients)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, *blocks = ctx.saved_tensors
    R, heads = ctx.slots, ctx.heads
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_bias = q.new_zeros(heads, R + 1)
    for (a, b), weights in zip(_blocks(q, R), blocks):
        d_weights = torch.bmm(dy[:, a:b], v[:, a : R + b].transpose(1, 2))
        d_scores = d_weights.sub_((d_weights * weights).sum(-1, keepdim=True)).mul_(weights)
        dv[:, a : R + b].baddbmm_(weights.transpose(1, 2), dy[:, a:b])
        dk[:, a : R + b].baddbmm_(d_scores.transpose(1, 2), q[:, a:b])
        dq[:, a:b] = torch.bmm(d_scores, k[:, a : R + b])
        d_bias += _sum_by_distance(d_scores.view(len(d_scores) // heads, heads, *d_scores.shape[1:]).sum(0))
    return dq, dk, dv, None, d_bias


def block_length(rows: int, T: int, R: int, on_gpu: bool) -> int:
    """Queries of a block. Half of the band per block costs 1.5 times the band's scores.

    On a GPU a block of few scores takes as long as its launches do, so blocks are longer where there are few rows.
    """
    length = max(16, R // 2)
    longer = min(T, 2 * length)
    while on_gpu and length < longer and rows * longer * (R + longer) <= _FILLS_A_GPU:
        length, longer = longer, min(T, 2 * longer)
    return length


def _blocks(q: Tensor, R: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the queries of each block."""
    rows, T = q.shape[:2]
    length = block_length(rows, T, R, q.is_cuda)
    for begin in range(0, T, length):
        yield begin, min(T, begin + length)


def _distances(n: int, R: int, like: Tensor) -> Tensor:
    """Between the queries and keys of a block: [n, R + n], negative for keys after the query."""
    steps = torch.arange(R + n, device=like.device, dtype=like.dtype)
    return steps[R:].unsqueeze(1) - steps


def _sum_by_distance(scores: Tensor) -> Tensor:
    """[h, n, R + n] -> [h, R + 1]: the diagonals' sums, by distance. The order of a sum is fixed, on a GPU too."""
    heads, n, keys = scores.shape
    diagonals = scores.contiguous().as_strided((heads, n, keys - n + 1), (n * keys, keys + 1, 1))
    return diagonals.sum(1).flip(1)
