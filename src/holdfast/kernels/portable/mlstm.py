"""The matrix memory of an mLSTM over whole sequences: parallel inside a chunk, recurrent from chunk to chunk.

`reference/mlstm.py` specifies what is computed. With F the running sum of log_f inside a chunk, and only steps of one
episode together:

    y[t] = sum over s <= t of exp(F[t] - F[s]) i[s] (k[s] q[t]) v[s]  +  what the memory at the start still gives

Resets are a mask inside the chunk. A product with a masked step would turn NaN into NaN even so; steps that are not
finite are therefore replaced by 0, and exactly the queries that see one of them get NaN afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.checks import values_are_readable
from holdfast.kernels import reference
from holdfast.kernels.operands import MatrixInputs, Resets

CHUNK = 32


def sequence(inputs: MatrixInputs, memory: Tensor, resets: Resets) -> tuple[Tensor, Tensor]:
    """inputs [T, B, h, ...]; memory [B, h, d, d]; resets.h [h, d, d] -> y [T, B, h, d], the final memory."""
    if resets.detach:  # the gradient inside a chunk would be cut, at another step in each row
        return reference.mlstm.sequence(inputs, memory, resets)
    ys = []
    for begin in range(0, inputs.q.shape[0], CHUNK):
        part = slice(begin, begin + CHUNK)
        chunk = MatrixInputs(*[leaf[part].movedim(0, 2) for leaf in inputs])  # [B, h, L, ...]
        mask = None if resets.mask is None else resets.mask[part].t()
        y, memory = _chunk(chunk, memory, mask, resets.h)
        ys.append(y.movedim(2, 0))
    return torch.cat(ys), memory


def _chunk(inputs: MatrixInputs, memory: Tensor, mask: Tensor | None, fill: Tensor | None) -> tuple[Tensor, Tensor]:
    """inputs [B, h, L, ...]; mask [B, L] -> y [B, h, L, d], the memory afterwards; NaN where something not finite is seen."""
    B, _, L, _ = inputs.q.shape
    if mask is None:
        mask, fill = torch.zeros(B, L, dtype=torch.bool, device=memory.device), None
    episode = mask.long().cumsum(1)  # [B, L]; 0: the one that the chunk starts in
    steps = torch.arange(L, device=memory.device)
    seen = (episode.unsqueeze(2) == episode.unsqueeze(1)) & (steps.unsqueeze(1) >= steps)  # [B, t, s]
    bad, lost = _not_finite(inputs), ~memory.detach().sum((1, 2, 3)).isfinite()  # [B, L], [B]
    if values_are_readable(bad) and not bad.any() and not lost.any():
        return _finite_chunk(inputs, memory, mask, episode, seen, fill)
    clean = MatrixInputs(*[leaf.masked_fill(_rows(bad, leaf), 0.0) for leaf in inputs])
    y, after = _finite_chunk(clean, memory.masked_fill(lost.view(B, 1, 1, 1), 0.0), mask, episode, seen, fill)
    sees_bad = (seen & bad.unsqueeze(1)).any(2) | ((episode == 0) & lost.unsqueeze(1))
    return y.masked_fill(_rows(sees_bad, y), torch.nan), after.masked_fill(sees_bad[:, -1].view(B, 1, 1, 1), torch.nan)


def _finite_chunk(
    inputs: MatrixInputs, memory: Tensor, mask: Tensor, episode: Tensor, seen: Tensor, fill: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, v, i, log_f = inputs
    # In float64: differences of long sums. A gate that has closed once must not cost the digits of those after it.
    total = log_f.double().cumsum(2)  # [B, h, L]
    decay = (total.unsqueeze(3) - total.unsqueeze(2)).to(q.dtype).masked_fill(~seen.unsqueeze(1), -torch.inf).exp()
    written = v * i.unsqueeze(3)
    y = torch.matmul(torch.matmul(q, k.transpose(2, 3)) * decay, written)
    after = torch.matmul((written * decay[:, :, -1].unsqueeze(3)).transpose(2, 3), k)

    first = (episode == 0).unsqueeze(1)  # [B, 1, L]
    kept = total.to(q.dtype).exp().masked_fill(~first, 0.0)
    y = y + kept.unsqueeze(3) * torch.matmul(q, memory.transpose(2, 3))
    # What is forgotten, not what is kept, as in a step.
    change = after + torch.expm1(total[:, :, -1:, None].to(q.dtype)) * memory
    after = torch.where(first[:, :, -1:, None], memory + change, after)
    if fill is not None:
        steps = torch.arange(mask.shape[1], device=mask.device)
        began = torch.where(mask, steps, 0).cummax(1).values.unsqueeze(1).expand_as(log_f)  # the episode's first step
        before = (total - log_f).gather(2, began)
        kept = (total - before).to(q.dtype).exp().masked_fill(first, 0.0)
        y = y + kept.unsqueeze(3) * torch.matmul(q, fill.transpose(1, 2))
        after = after + kept[:, :, -1:, None] * fill
    return y, after


def _not_finite(inputs: MatrixInputs) -> Tensor:
    """Whether a step holds a number that is not finite: [B, L]."""
    q, k, v, i, log_f = (leaf.detach() for leaf in inputs)
    return ~((q + k + v).sum((1, 3)) + (i + log_f).sum(1)).isfinite()


def _rows(flags: Tensor, like: Tensor) -> Tensor:
    """[B, L] so that it broadcasts over [B, h, L] or [B, h, L, d]."""
    return flags.unsqueeze(1) if like.dim() == 3 else flags[:, None, :, None]
