"""Sequences whose steps each come with a stored state, as replay buffers and collectors give them.

`run` is a core over [T, B], where a trajectory may begin at any step: with a reset (its stored state is the zeros of a
fresh episode), or from the middle of an episode (a slice out of a replay buffer: its stored state is used).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.cores import Core
from holdfast.integrations import sequences
from holdfast.state import State


def run(core: Core, x: Tensor, stored: State, begins: Tensor) -> tuple[Tensor, State]:
    """x [T, B, I], stored leaves [T, B, ...], begins [T, B] bool -> y [T, B, O] and states [T, B, ...].

    The states are those after each trajectory's last step here (compiled: after the last step of all), and zero at all
    other steps.
    """
    steps = begins.shape[0]
    start = state_ops.tree_map(lambda leaf: leaf[0], stored)
    middle = begins & _is_set(stored, begins)  # begins in the middle of an episode
    resets = begins & ~middle
    if torch.compiler.is_compiling():
        # No look at the numbers is possible, so the one case that needs it is refused when it runs.
        torch._assert_async(
            ~middle[1:].any(),
            "compiled, a sequence may hold new episodes but no slice from the middle of another: shape the batch "
            "[slices, T], or leave this call uncompiled",
        )
        y, final = core(x, start, resets)
        return y, _at_the_end(final, steps)
    if bool(middle[1:].any()):
        y = _run_pieces(core, x, stored, middle, resets)
        after = state_ops.tree_map(torch.zeros_like, stored)
        inner = torch.ones_like(begins[0])
    else:
        y, final = core(x, start, resets)
        after = _at_the_end(final, steps)
        inner = torch.zeros_like(begins[0])  # the last step is known already
    ends = torch.cat([begins[1:], inner.unsqueeze(0)])  # [T, B]
    if bool(ends.any()):
        with torch.no_grad():
            at_ends = _states_at(ends, core, x, stored, begins | _first(begins), resets)
        after = state_ops.tree_map(lambda new, leaf: torch.where(_rows(ends, leaf), new, leaf), at_ends, after)
    return y, after


def _is_set(stored: State, like: Tensor) -> Tensor:
    """Whether a stored state is anything but zeros, [T, B]."""
    found = torch.zeros_like(like)
    for leaf in state_ops.leaves(stored):
        found = found | (leaf != 0).flatten(2).any(-1)
    return found


def _first(like: Tensor) -> Tensor:
    first = torch.zeros_like(like)
    first[0] = True
    return first


def _at_the_end(final: State, steps: int) -> State:
    """[B, ...] -> [T, B, ...], zero but for the last step."""
    return state_ops.tree_map(
        lambda leaf: torch.cat([leaf.new_zeros(steps - 1, *leaf.shape), leaf.unsqueeze(0)]), final
    )


def _run_pieces(core: Core, x: Tensor, stored: State, middle: Tensor, resets: Tensor) -> Tensor:
    """Each part that begins in the middle of an episode becomes a row with its own start state."""
    steps, batch = middle.shape
    where = middle.cpu().numpy()
    pieces: list[sequences.Piece] = []
    heads: list[tuple[int, int]] = []  # (t, b) of the state each piece starts from
    for b in range(batch):
        bounds = [0, *(np.flatnonzero(where[1:, b]) + 1).tolist(), steps]
        for first, end in pairwise(bounds):
            pieces.append(sequences.Piece(b * steps + first, end - first, len(heads)))
            heads.append((first, b))
    layout = sequences.lay_out([[piece] for piece in pieces])
    index = torch.as_tensor(layout.step, device=x.device)  # [rows, longest], environment-major
    valid = torch.as_tensor(layout.valid, device=x.device)
    t, env = index % steps, index // steps
    head_t, head_env = torch.tensor([heads[piece] for piece in layout.chunk], device=x.device).unbind(1)
    start = state_ops.tree_map(lambda leaf: leaf[head_t, head_env], stored)
    y, _ = core(x[t, env].transpose(0, 1), start, resets[t, env].t())  # [longest, rows, O]
    out = y.new_zeros(batch * steps, y.shape[-1]).index_copy(0, index[valid], y.transpose(0, 1)[valid])
    return out.view(batch, steps, -1).transpose(0, 1)


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    """A [T, B] mask that broadcasts over a [T, B, ...] leaf."""
    return mask.view(*mask.shape, *(1,) * (like.dim() - 2))


def _states_at(ends: Tensor, core: Core, x: Tensor, stored: State, begins: Tensor, resets: Tensor) -> State:
    """The states after the steps in `ends`: their trajectories once more, longest first, dropping out as they end."""
    is_begin, is_end = begins.cpu().numpy(), ends.cpu().numpy()
    found: list[tuple[int, int, int]] = []  # (length, first step, environment)
    for b in range(is_begin.shape[1]):
        firsts = np.flatnonzero(is_begin[:, b])
        for last in np.flatnonzero(is_end[:, b]).tolist():
            first = int(firsts[np.searchsorted(firsts, last, side="right") - 1])
            found.append((last - first + 1, first, b))
    found.sort(reverse=True)
    length, begin, env = torch.tensor(found, device=x.device).unbind(1)
    state = state_ops.tree_map(lambda leaf: leaf[begin, env], stored)
    fresh = core.initial_state(len(found))
    state = state_ops.where(resets[begin, env], fresh, state)
    lengths = [n for n, _, _ in found]
    after = state_ops.tree_map(torch.zeros_like, stored)
    done = 0
    for until in sorted(set(lengths)):
        alive = sum(n >= until for n in lengths)
        leaving = sum(n > until for n in lengths)
        t = begin[:alive] + torch.arange(done, until, device=x.device).unsqueeze(1)  # [steps of this span, alive]
        state = state_ops.tree_map(lambda leaf, n=alive: leaf[:n].contiguous(), state)
        _, state = core(x[t, env[:alive]], state)
        at = (begin + length - 1)[leaving:alive], env[leaving:alive]
        for target, leaf in zip(state_ops.leaves(after), state_ops.leaves(state)):
            target[at] = leaf[leaving:alive]
        done = until
    return after
