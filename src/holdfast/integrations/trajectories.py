"""Sequences whose steps each come with a stored state, as replay buffers and collectors give them.

`run` runs a core over [T, B], where a trajectory may begin at any step: with a reset (its stored state is the zeros of a
fresh episode), or in the middle of an episode (a slice out of a replay buffer: its stored state is used). Keys and
batch shapes are handled in `torchrl.py`.
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

    The states are those after each trajectory's last step here, and zero at all other steps.
    """
    steps = begins.shape[0]
    start = state_ops.tree_map(lambda leaf: leaf[0], stored)
    middle = begins & _is_set(stored, begins)  # begins in the middle of an episode
    resets = begins & ~middle
    compiling = torch.compiler.is_compiling()
    if compiling:
        # Values cannot be read while compiling, so the one case that needs them is refused when the graph runs.
        torch._assert_async(
            ~middle[1:].any(),
            "compiled, a sequence may hold new episodes but no slice from the middle of another: shape the batch "
            "[slices, T], or leave this call uncompiled",
        )
    elif bool(middle[1:].any()):
        y, states = _run_pieces(core, x, stored, middle, resets)
        return y, _where_they_end(states, begins)
    if compiling or bool(begins[1:].any()):
        y, final, states = core.trace(x, start, resets)
        after = _where_they_end(states, begins)
        # The last state keeps its gradient.
        return y, state_ops.tree_map(lambda leaf, last: torch.cat([leaf[:-1], last.unsqueeze(0)]), after, final)
    y, final = core(x, start, resets)
    return y, state_ops.tree_map(
        lambda leaf: torch.cat([leaf.new_zeros(steps - 1, *leaf.shape), leaf.unsqueeze(0)]), final
    )


def _where_they_end(states: State, begins: Tensor) -> State:
    """The states [T, B, ...] at the last step of each trajectory; zero elsewhere."""
    ends = torch.cat([begins[1:], torch.ones_like(begins[:1])])
    return state_ops.tree_map(
        lambda leaf: leaf.masked_fill(~ends.view(*ends.shape, *(1,) * (leaf.dim() - 2)), 0), states
    )


def _is_set(stored: State, begins: Tensor) -> Tensor:
    """Whether the state stored with a first step is anything but zeros, [T, B]."""
    found = torch.zeros_like(begins)
    for leaf in state_ops.leaves(stored):
        if torch.compiler.is_compiling():
            found = found | state_ops.flat_rows((leaf != 0).flatten(0, 1)).any(-1).view_as(begins)
        else:
            found[begins] |= state_ops.flat_rows(leaf[begins] != 0).any(-1)
    return found


def _run_pieces(core: Core, x: Tensor, stored: State, middle: Tensor, resets: Tensor) -> tuple[Tensor, State]:
    """Each part that begins in the middle of an episode becomes a row with its own start state."""
    steps, batch = middle.shape
    where = middle.cpu().numpy()
    pieces: list[sequences.Piece] = []
    starts: list[tuple[int, int]] = []  # (t, b) of the state each piece starts from
    for b in range(batch):
        bounds = [0, *(np.flatnonzero(where[1:, b]) + 1).tolist(), steps]
        for first, end in pairwise(bounds):
            pieces.append(sequences.Piece(b * steps + first, end - first, len(starts)))
            starts.append((first, b))
    layout = sequences.lay_out([[piece] for piece in pieces])
    index = torch.as_tensor(layout.step, device=x.device)  # [rows, longest], environment-major
    valid = torch.as_tensor(layout.valid, device=x.device)
    t, env = index % steps, index // steps
    start_t, start_env = torch.tensor([starts[piece] for piece in layout.state], device=x.device).unbind(1)
    start = state_ops.tree_map(lambda leaf: leaf[start_t, start_env], stored)
    y, _, states = core.trace(x[t, env].transpose(0, 1), start, resets[t, env].t())  # [longest, rows, ...]

    def back(rows: Tensor) -> Tensor:
        """[longest, rows, ...] -> [T, B, ...]"""
        flat = rows.new_zeros(batch * steps, *rows.shape[2:])
        flat = flat.index_copy(0, index[valid], rows.transpose(0, 1)[valid])
        return flat.view(batch, steps, *rows.shape[2:]).transpose(0, 1)

    return back(y), state_ops.tree_map(back, states)
