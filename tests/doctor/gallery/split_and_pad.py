"""A module that cuts rows into episodes, pads them to one length, runs them side by side, and lays them back."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from broken.base import size
from doctor.gallery.base import Exhibit
from holdfast.doctor.subjects import Module


class SplitAndPad(nn.Module):
    """`(x [T, B, I], state [B, H], resets [T, B]) -> (y, state)`. The state is each row's after its last step."""

    def __init__(self):
        super().__init__()
        self.input_size = size.obs
        self.gru = nn.GRU(size.obs, size.hidden)

    def final(self, y, lengths):
        """`[pieces, H]` the state after each piece, from its outputs `[longest, pieces, H]`."""
        return y[lengths - 1, torch.arange(len(lengths))]

    def forward(self, x, state, resets):
        steps, rows = resets.shape
        state = x.new_zeros(rows, size.hidden) if state is None else state
        pieces = []  # (row, first step, last step)
        for row in range(rows):
            cuts = [0, *(t for t in range(1, steps) if resets[t, row]), steps]
            pieces += [(row, first, last) for first, last in pairwise(cuts)]
        starts = [torch.zeros_like(state[row]) if resets[first, row] else state[row] for row, first, _ in pieces]
        padded = pad_sequence([x[first:last, row] for row, first, last in pieces])  # [longest, pieces, I]
        y, _ = self.gru(padded, torch.stack(starts)[None])
        lengths = torch.tensor([last - first for _, first, last in pieces])
        final = self.final(y, lengths)
        whole = [
            torch.cat([y[: last - first, i] for i, (b, first, last) in enumerate(pieces) if b == row])
            for row in range(rows)
        ]
        ends = [i for i, (_, _, last) in enumerate(pieces) if last == steps]
        return torch.stack(whole, 1), final[ends]


class LosesStatesOfShortPieces(SplitAndPad):
    """The final states are read at the longest piece's end, so that those of shorter pieces come back as zeros."""

    def final(self, y, lengths):
        longest = (lengths == len(y))[:, None]
        return torch.where(longest, y[-1], torch.zeros_like(y[-1]))


def _healthy():
    return Module(SplitAndPad())


EXHIBITS = [
    Exhibit(
        "gallery-torchrl-3711",
        17,
        "The final states of episodes shorter than the longest come back as zeros.",
        "state-of-another-step",
        lambda: Module(LosesStatesOfShortPieces()),
        _healthy,
        thread="https://github.com/pytorch/rl/issues/3711",
    )
]
