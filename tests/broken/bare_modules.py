"""Bare recurrent modules."""

from __future__ import annotations

import torch
from torch import nn

from broken.base import Broken, first_line, size
from holdfast.doctor.subjects import Module


class Core(nn.Module):
    """`(x [T, B, I], state, resets [T, B]) -> (y, state)`, right."""

    def __init__(self):
        super().__init__()
        self.input_size = size.obs
        self.cell = nn.GRUCell(size.obs, size.hidden)

    def start(self, x):
        return x.new_zeros(x.shape[1], size.hidden)

    def forward(self, x, state, resets):
        state = self.start(x) if state is None else state
        outputs = []
        for x_t, reset in zip(x, resets):
            state = self.cell(x_t, torch.where(reset[:, None], torch.zeros_like(state), state))
            outputs.append(state)
        return torch.stack(outputs), state


class FastPathForgetsTheState(Core):
    """Sequences of 2 to 7 steps take a path that ignores the carried state."""

    def forward(self, x, state, resets):
        return super().forward(x, None if 1 < len(x) < 8 else state, resets)


class ReturnsTheFirstState(Core):
    """A call returns the state after its first step."""

    def forward(self, x, state, resets):
        outputs, _ = super().forward(x, state, resets)
        return outputs, outputs[0]


class SinglePrecisionStart(Core):
    """The first state is always float32."""

    def start(self, x):
        return torch.zeros(x.shape[1], size.hidden, dtype=torch.float32)


class IgnoresTruncationInTraining(Module):
    """The loop passes only `terminated` to the training call."""

    def replay(self, segment):
        return super().replay(segment.with_(truncated=torch.zeros_like(segment.truncated)))


def _healthy():
    return Module(Core())


def _healthy_lstm():
    return Module(nn.LSTM(size.obs, size.hidden))


def _broken(name, case, does, cause, subject, twin=_healthy, **more):
    return Broken(f"module-{name}", case, does, cause, subject, twin, **more)


def _of(kind, name, case, cause, **more):
    return _broken(name, case, first_line(kind), cause, lambda: Module(kind()), **more)


BROKEN = [
    _of(FastPathForgetsTheState, "chunks", 5, "depends-on-chunking"),
    _of(ReturnsTheFirstState, "first-state", 17, "state-of-another-step"),
    _of(SinglePrecisionStart, "single-precision", 20, "dtype-baked-in", severity="warning"),
    _broken(
        "truncation-in-training",
        3,
        first_line(IgnoresTruncationInTraining),
        "truncation-ignored",
        lambda: IgnoresTruncationInTraining(Core()),
    ),
    _broken(
        "bidirectional",
        15,
        "A bidirectional layer sees later observations.",
        "sees-the-future",
        lambda: Module(nn.LSTM(size.obs, size.hidden, bidirectional=True)),
        _healthy_lstm,
    ),
    _broken(
        "nobody-resets",
        1,
        "Training runs nn.LSTM over the whole segment.",
        "reset-dropped-in-training",
        lambda: Module(nn.LSTM(size.obs, size.hidden), resets="nobody"),
        _healthy_lstm,
    ),
    _broken(
        "gru-dropout",
        18,
        "Dropout between the layers is active.",
        "random-training-leg",
        lambda: Module(nn.GRU(size.obs, size.hidden, 2, dropout=0.3)),
        lambda: Module(nn.GRU(size.obs, size.hidden, 2)),
    ),
]
