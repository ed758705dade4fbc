"""A state-space layer with two paths: one for a whole row, one for rows that several devices share."""

from __future__ import annotations

import torch
from torch import nn

from broken.base import size
from doctor.gallery.base import exhibit
from holdfast.doctor.subjects import Packed


class Mixer(nn.Module):
    """A convolution over two tokens and a decaying sum, each within a document."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(size.obs, size.hidden), nn.Linear(size.hidden, size.actions)
        self.taps, self.decay = nn.Parameter(torch.randn(2, size.hidden)), nn.Parameter(torch.randn(size.hidden))

    def documents(self, x, cu_seqlens):
        """`[N]` the number of each token's document."""
        starts = torch.zeros(x.shape[1], dtype=torch.long)
        if cu_seqlens is not None:
            starts[cu_seqlens[1:-1].long()] = 1
        return starts.cumsum(0)

    def forward(self, x, cu_seqlens=None):
        document = self.documents(x, cu_seqlens)
        u = self.enter(x)
        before = torch.cat([torch.zeros_like(u[:, :1]), u[:, :-1]], dim=1)
        continues = torch.cat([document.new_tensor([-1]), document[:-1]]) == document
        u = (self.taps[1] * u + self.taps[0] * torch.where(continues[:, None], before, 0.0)).tanh()
        place = torch.arange(x.shape[1])
        lag = place[:, None] - place  # [N, N]
        same = (lag >= 0) & (document[:, None] == document)
        weight = torch.where(same[..., None], self.decay.sigmoid() ** lag.clamp(min=0)[..., None], 0.0)
        return self.leave(torch.einsum("tsh,bsh->bth", weight, u))


class SharedMixer(Mixer):
    """The path for shared rows is given no boundaries: neither the convolution nor the scan starts over."""

    def documents(self, x, cu_seqlens):
        return super().documents(x, None)


class Row(Packed):
    """A packed row through the layer."""

    layer_kind = Mixer

    def __init__(self):
        super().__init__(self.layer_kind(), (size.obs,))


class SharedRow(Row):
    """Neither the convolution nor the scan is told where documents begin when devices share a row."""

    layer_kind = SharedMixer


EXHIBITS = [
    exhibit(
        "prime-rl-3001", 21, "reset-dropped-in-training", "https://github.com/PrimeIntellect-ai/prime-rl/pull/3001",
        SharedRow, Row,
    ),
]  # fmt: skip
