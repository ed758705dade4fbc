"""Bare recurrent modules."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.doctor.subjects import Module
from patients.base import HIDDEN, OBS, Patient


class Core(nn.Module):
    """`(x [T, B, I], state, resets [T, B]) -> (y, state)`, right."""

    input_size = OBS

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(OBS, HIDDEN)

    def start(self, x):
        return x.new_zeros(x.shape[1], HIDDEN)

    def forward(self, x, state, resets):
        state = self.start(x) if state is None else state
        outputs = []
        for x_t, reset in zip(x, resets):
            state = self.cell(x_t, torch.where(reset[:, None], torch.zeros_like(state), state))
            outputs.append(state)
        return torch.stack(outputs), state


class FastPathForgetsTheState(Core):
    """Sequences of 2 to 7 steps take a path that starts anew."""

    def forward(self, x, state, resets):
        return super().forward(x, None if 1 < len(x) < 8 else state, resets)


class ReturnsTheFirstState(Core):
    def forward(self, x, state, resets):
        outputs, _ = super().forward(x, state, resets)
        return outputs, outputs[0]


class SinglePrecisionStart(Core):
    def start(self, x):
        return torch.zeros(x.shape[1], HIDDEN, dtype=torch.float32)


class IgnoresTruncationInTraining(Module):
    """A loop that hands `terminated` to the training call."""

    def replay(self, segment):
        return super().replay(segment.with_(truncated=torch.zeros_like(segment.truncated)))


def _healthy():
    return Module(Core())


def _healthy_lstm():
    return Module(nn.LSTM(OBS, HIDDEN))


def _patient(name, case, cause, sick, twin=_healthy):
    return Patient(f"module-{name}", case, cause, sick, twin)


PATIENTS = [
    _patient("chunks", 5, "depends-on-chunking", lambda: Module(FastPathForgetsTheState())),
    _patient("first-state", 17, "state-of-another-step", lambda: Module(ReturnsTheFirstState())),
    _patient("single-precision", 20, "dtype-baked-in", lambda: Module(SinglePrecisionStart())),
    _patient("truncation-in-training", 3, "truncation-ignored", lambda: IgnoresTruncationInTraining(Core())),
    _patient(
        "bidirectional",
        15,
        "sees-the-future",
        lambda: Module(nn.LSTM(OBS, HIDDEN, bidirectional=True)),
        _healthy_lstm,
    ),
    _patient(
        "nobody-resets",
        1,
        "reset-dropped-in-training",
        lambda: Module(nn.LSTM(OBS, HIDDEN), resets="nobody"),
        _healthy_lstm,
    ),
    _patient(
        "gru-dropout",
        18,
        "random-training-leg",
        lambda: Module(nn.GRU(OBS, HIDDEN, 2, dropout=0.3)),
        lambda: Module(nn.GRU(OBS, HIDDEN, 2)),
    ),
]
