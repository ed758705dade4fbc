"""A linear-attention layer of a language model: a short convolution, then a recurrence. Rows hold documents end to end.

The generator writes each document by itself; the trainer packs several into a row and says where they begin.
"""

from __future__ import annotations

import torch
from torch import nn

from broken.base import size
from doctor.gallery.base import exhibit
from holdfast.doctor import Replay, Subject, SubjectStep


class PackedRows(Subject):
    """Both the convolution's window and the recurrent state start over with a document."""

    def __init__(self):
        super().__init__((size.obs,))
        self.project, self.head = nn.Linear(size.obs, size.hidden), nn.Linear(size.hidden, size.actions)
        self.taps = nn.Parameter(torch.randn(3, size.hidden))
        self.decay = nn.Parameter(torch.randn(size.hidden))
        self.window = self.sums = None

    def layer(self, x, window, sums):
        """One token of every row: `window` `[B, 2, H]` holds the last two inputs, `sums` `[B, H]` the recurrent state."""
        u = self.project(x)
        mixed = self.taps[0] * window[:, 0] + self.taps[1] * window[:, 1] + self.taps[2] * u
        sums = self.decay.sigmoid() * sums + mixed.tanh()
        return self.head(sums), torch.stack([window[:, 1], u], dim=1), sums

    def begin(self, num_envs):
        self.window = self.taps.new_zeros(num_envs, 2, size.hidden)
        self.sums = self.taps.new_zeros(num_envs, size.hidden)

    def step(self, obs, terminated, truncated, env_ids):
        first = terminated | truncated
        with torch.no_grad():
            window, sums = _clear(self.window, first), _clear(self.sums, first)
            output, self.window, self.sums = self.layer(obs, window, sums)
        return SubjectStep(output)

    def mark(self):
        return self.window.clone(), self.sums.clone()

    def state(self):
        return self.window, self.sums

    def boundaries(self, documents, attention_mask):
        """For the convolution and for the recurrence, `[T, B]` where documents begin."""
        return documents, documents

    def replay(self, segment):
        (window, sums), outputs = segment.start, []
        documents = segment.terminated | segment.truncated
        for_window, for_sums = self.boundaries(documents, torch.ones_like(documents))
        for t, obs in enumerate(segment.obs):
            output, window, sums = self.layer(obs, _clear(window, for_window[t]), _clear(sums, for_sums[t]))
            outputs.append(output)
        return Replay(torch.stack(outputs), state=(window, sums))


def _clear(x, first):
    return torch.where(first.reshape(-1, *[1] * (x.dim() - 1)), torch.zeros_like(x), x)


class RecurrenceNotTold(PackedRows):
    """The convolution is told where documents begin, the recurrence is not."""

    def boundaries(self, documents, attention_mask):
        return documents, torch.zeros_like(documents)


class LayerNotTold(PackedRows):
    """Neither the convolution nor the recurrence is told where documents begin."""

    def boundaries(self, documents, attention_mask):
        return torch.zeros_like(documents), torch.zeros_like(documents)


class MaskOverridesDocuments(PackedRows):
    """Boundaries are derived from the attention mask whenever there is one, and a mask of ones has none."""

    def boundaries(self, documents, attention_mask):
        after_padding = torch.zeros_like(documents)
        after_padding[1:] = attention_mask[1:] & ~attention_mask[:-1]
        return after_padding, after_padding


EXHIBITS = [
    exhibit("slime-1686", 21, "partial-reset", "https://github.com/THUDM/slime/pull/1686", RecurrenceNotTold, PackedRows),
    exhibit(
        "automodel-2147", 21, "reset-dropped-in-training", "https://github.com/NVIDIA-NeMo/Automodel/pull/2147",
        LayerNotTold, PackedRows,
    ),
    exhibit(
        "fla-838", 21, "reset-dropped-in-training", "https://github.com/fla-org/flash-linear-attention/issues/838",
        MaskOverridesDocuments, PackedRows,
    ),
]  # fmt: skip
