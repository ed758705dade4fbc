"""A linear scan over a segment, as fast trainers run their cells, and the flags that it reads."""

from __future__ import annotations

import torch
from torch import nn

from broken.base import early_by_one, late_by_one, size
from doctor.gallery.base import exhibit
from holdfast.doctor import Replay, Subject, SubjectStep


class Scan(Subject):
    """A minGRU: h = (1 - z) h + z g, where z and g depend on the observation alone. `first` came with its observation."""

    def __init__(self):
        super().__init__((size.obs,))
        self.gates = nn.Linear(size.obs, 2 * size.hidden)
        self.head = nn.Linear(size.hidden, size.actions)
        self.h = None

    def cell(self, obs, h, first):
        z, g = self.gates(obs).chunk(2, dim=-1)
        h = torch.where(first[:, None], torch.zeros_like(h), h)
        return torch.lerp(h, g.tanh(), z.sigmoid())

    def begin(self, num_envs):
        self.h = self.gates.weight.new_zeros(num_envs, size.hidden)

    def acting_flags(self, terminated, truncated):
        return terminated | truncated

    def training_flags(self, segment):
        return segment.terminated | segment.truncated

    def step(self, obs, terminated, truncated, env_ids):
        with torch.no_grad():
            self.h = self.cell(obs, self.h, self.acting_flags(terminated, truncated))
            return SubjectStep(self.head(self.h))

    def mark(self):
        return self.h.clone()

    def state(self):
        return self.h

    def replay(self, segment):
        h, outputs = segment.start, []
        for obs, first in zip(segment.obs, self.training_flags(segment)):
            h = self.cell(obs, h, first)
            outputs.append(self.head(h))
        return Replay(torch.stack(outputs), state=h)


class ResetsOnTheTerminalBefore(Scan):
    """Training resets on terminal[t-1], the rollout on terminal[t]."""

    def training_flags(self, segment):
        return late_by_one(super().training_flags(segment))


class StoresTheNewDone(Scan):
    """A stored step holds the last observation and the new done, so training resets one observation early."""

    def training_flags(self, segment):
        return early_by_one(super().training_flags(segment))


class WaitsForAFirstStep(Scan):
    """Resets on a flag of first steps, which the auto-reset of the environments never sets."""

    def acting_flags(self, terminated, truncated):
        return torch.zeros_like(terminated)

    def training_flags(self, segment):
        return torch.zeros_like(segment.terminated)


EXHIBITS = [
    exhibit(
        "pufferlib-622", 26, "late-by-one", "https://github.com/PufferAI/PufferLib/issues/622",
        ResetsOnTheTerminalBefore, Scan,
    ),
    exhibit(
        "jaxmarl-127", 26, "early-by-one", "https://github.com/bold-lab-ai/JaxMARL/pull/127", StoresTheNewDone, Scan,
    ),
    exhibit(
        "mava-1006", 6, "never-resets", "https://github.com/instadeepai/Mava/issues/1006", WaitsForAFirstStep, Scan,
    ),
]  # fmt: skip
