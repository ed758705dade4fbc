"""What the loops over time of both cells share: resets, the products around the loop, chunks of the backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of [steps, B, H] that the backward handles at once: about what stays in a core's L2 cache.
_CHUNK = 32768


def chunks_from_the_end(T: int, B: int, H: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the chunks of steps that the backward takes, last first."""
    steps = max(1, _CHUNK // max(1, B * H))
    for end in range(T, 0, -steps):
        yield max(0, end - steps), end


def steps_with_resets(mask: Tensor | None, T: int) -> list[bool]:
    """Which steps reset any row. On a GPU reading the mask would stall the queue, so every step counts."""
    if mask is None:
        return [False] * T
    if mask.device.type != "cpu":
        return [True] * T
    return mask.any(dim=1).tolist()


def masks_by_step(mask: Tensor | None) -> tuple[Tensor, ...]:
    """One [B, 1] per step; empty without resets."""
    return () if mask is None else mask.unsqueeze(-1).unbind(0)


def reset(state: Tensor, mask: Tensor, value: Tensor | None) -> Tensor:
    """The state with the rows of `mask` [B, 1] replaced by `value` [H]; None: zeros."""
    if value is None:
        return state.masked_fill(mask, 0.0)
    return torch.where(mask, value.to(state.dtype), state)


def states_before(
    start: Tensor, sequence: Tensor, mask: Tensor | None, value: Tensor | None, detach_at_reset: bool
) -> Tensor:
    """The state each step started from, [T, B, H]: shifted by one, then reset. Selects, so that no NaN survives."""
    shifted = torch.cat([start.to(sequence.dtype).unsqueeze(0), sequence[:-1]])
    if mask is None or detach_at_reset:
        return shifted
    if value is None:
        return shifted.masked_fill_(mask.unsqueeze(-1), 0.0)
    return torch.where(mask.unsqueeze(-1), value.to(shifted.dtype), shifted)


def project(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x @ w.T + bias over all steps in one product. Autocast leaves the out= form alone."""
    T, B, _ = x.shape
    out = x.new_empty(T * B, w.shape[0])
    if bias is None:
        torch.mm(x.flatten(0, 1), w.t(), out=out)
    else:
        torch.addmm(bias, x.flatten(0, 1), w.t(), out=out)
    return out.view(T, B, w.shape[0])


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in a form that autocast leaves alone."""
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def input_and_weight_grads(
    d_input: Tensor, d_hidden: Tensor, x: Tensor, h_before: Tensor, w_ih: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dW_ih, dW_hh from the gate gradients on the input side and on the hidden side, [T*B, G] each."""
    dx = mm(d_input, w_ih).view_as(x) if need_x else None
    if not need_w:
        return dx, None, None
    return dx, mm(d_input.t(), x.flatten(0, 1)), mm(d_hidden.t(), h_before.flatten(0, 1))
