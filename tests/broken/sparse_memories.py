"""Memories that see only some of the past, all healthy, and policies whose gradients through time are wrong.

The outputs of the healthy ones do not depend on every earlier step, so many gradients are 0 as they should be. They are
modules `(x [T, B, I], state, resets [T, B]) -> (y, state)`, written step by step.
"""

from __future__ import annotations

import torch
from torch import nn

import holdfast as hf
from broken.base import Broken, first_line, size
from holdfast.doctor import subjects


class Memory(nn.Module):
    """A state `[B, width]` that `write` changes at each step, and a head that reads the state and the observation."""

    def __init__(self, width=None):
        super().__init__()
        self.input_size, self.width = size.obs, width or size.hidden
        self.encode = nn.Linear(size.obs, size.hidden)
        self.head = nn.Linear(self.width + size.obs, size.actions)

    def forward(self, x, state, resets):
        h = x.new_zeros(x.shape[1], self.width) if state is None else state
        outputs = []
        for x_t, first in zip(x, resets):
            h = torch.where(first[:, None], torch.zeros_like(h), h)
            seen, h = self.write(x_t, h)
            outputs.append(self.head(torch.cat([seen, x_t], -1)))
        return torch.stack(outputs), h

    def write(self, x, h):
        """What the head reads, and the next state."""
        raise NotImplementedError


class FrameStack(Memory):
    """The last four observations."""

    def __init__(self):
        super().__init__(4 * size.obs)

    def write(self, x, h):
        h = torch.cat([h[:, size.obs :], x], -1)
        return h, h


class CausalConvolution(Memory):
    """A convolution over the last three steps and this one."""

    def __init__(self):
        super().__init__(3 * size.obs)
        self.filter = nn.Linear(4 * size.obs, 3 * size.obs)

    def write(self, x, h):
        window = torch.cat([h, x], -1)
        return torch.tanh(self.filter(window)), window[:, size.obs :]


class _Counting(Memory):
    """The first number of the state counts steps; the rest is for the subclass."""

    def __init__(self):
        super().__init__(size.hidden + 1)

    def write(self, x, h):
        count, kept = h[:, :1], h[:, 1:]
        h = torch.cat([count + 1, self.change(x, count, kept)], -1)
        return h, h


class EveryFourthStep(_Counting):
    """Written at every fourth step of an episode only."""

    def change(self, x, count, kept):
        return torch.where(count % 4 == 0, torch.tanh(self.encode(x) + kept), kept)


class FirstObservation(_Counting):
    """Remembers the first observation of an episode."""

    def change(self, x, count, kept):
        return torch.where(count == 0, torch.tanh(self.encode(x)), kept)


class StepCounter(Memory):
    """Counts the steps of the episode."""

    def __init__(self):
        super().__init__(1)

    def write(self, x, h):
        h = h + 1
        return torch.sin(h), h


class OwnWindow(Memory):
    """Attention over the last three steps."""

    def __init__(self):
        super().__init__(3 * size.obs + 3)
        self.query = nn.Linear(size.obs, size.obs)

    def write(self, x, h):
        keys, filled = h[:, :-3].unflatten(-1, (3, size.obs)), h[:, -3:]
        keys, filled = (
            torch.cat([keys[:, 1:], x.unsqueeze(1)], 1),
            torch.cat([filled[:, 1:], torch.ones_like(x[:, :1])], -1),
        )
        scores = (keys @ self.query(x).unsqueeze(-1)).squeeze(-1).masked_fill(filled == 0, float("-inf"))
        read = (scores.softmax(-1).unsqueeze(1) @ keys).squeeze(1)
        h = torch.cat([keys.flatten(1), filled], -1)
        return torch.cat([read, h[:, size.obs :] * 0], -1), h


class HardGate(Memory):
    """Written where a threshold is passed."""

    def write(self, x, h):
        h = torch.where(x[:, :1] > 0.5, torch.tanh(self.encode(x)), h)
        return h, h


class MaxPool(Memory):
    """The largest features so far."""

    def write(self, x, h):
        h = torch.maximum(h, self.encode(x))
        return h, h


class EightSlots(_Counting):
    """Eight slots, written in turn; the next slot is read."""

    def __init__(self):
        super().__init__()
        self.width = 8 * size.obs + 1
        self.head = nn.Linear(2 * size.obs, size.actions)

    def write(self, x, h):
        count, slots = h[:, :1], h[:, 1:].unflatten(-1, (8, size.obs))
        here = torch.arange(8) == count % 8
        slots = torch.where(here.unsqueeze(-1), x.unsqueeze(1), slots)
        read = slots[torch.arange(len(x)), ((count[:, 0] + 1) % 8).long()]
        return read, torch.cat([count + 1, slots.flatten(1)], -1)


# --- more, that nobody reported ---------------------------------------------------------------------------------------
class PreviousObservation(Memory):
    """Sees the previous observation, and nothing before it."""

    def __init__(self):
        super().__init__(size.obs)

    def write(self, x, h):
        return h, x


class DelayLine(Memory):
    """Sees the observation of three steps ago, and neither those before nor those between."""

    def __init__(self):
        super().__init__(3 * size.obs)

    def write(self, x, h):
        read = torch.cat([h[:, : size.obs], h[:, size.obs :] * 0], -1)
        return read, torch.cat([h[:, size.obs :], x], -1)


class ArgMax(Memory):
    """Keeps the observation with the largest first number."""

    def __init__(self):
        super().__init__(size.obs)

    def write(self, x, h):
        h = torch.where(x[:, :1] > h[:, :1], x, h)
        return h, h


class Saturated(Memory):
    """A counter that is clamped, and a clamped sum of observations."""

    def write(self, x, h):
        h = (h + self.encode(x)).clamp(-0.5, 0.5)
        return h, h


class ReluRing(Memory):
    """A rotated state with ReLU, in which many units are dead."""

    def write(self, x, h):
        h = torch.relu(h.roll(1, -1) - 0.3 + self.encode(x))
        return h, h


class FrozenEncoderAndSkip(Memory):
    """A GRU behind a frozen encoder, and a trained way around both."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(size.hidden, size.hidden)

    def write(self, x, h):
        h = self.cell(torch.tanh(self.encode(x)).detach(), h)
        return h, h


class GRUWithWindow(nn.Module):
    """A GRU next to attention over two steps."""

    def __init__(self):
        super().__init__()
        self.input_size = size.obs
        self.cell, self.window = (
            nn.GRUCell(size.obs, size.hidden),
            hf.WindowAttention(size.obs, 8, window=2, num_heads=2),
        )
        self.head = nn.Linear(size.hidden + 8, size.actions)

    def carried(self, h):
        return h

    def forward(self, x, state, resets):
        if state is None:
            state = {"h": x.new_zeros(x.shape[1], size.hidden), "window": self.window.initial_state(x.shape[1])}
        h, outputs = state["h"], []
        for x_t, first in zip(x, resets):
            h = self.cell(x_t, torch.where(first[:, None], torch.zeros_like(h), self.carried(h)))
            outputs.append(h)
        seen, window = self.window(x, state["window"], resets)
        return self.head(torch.cat([torch.stack(outputs), seen], -1)), {"h": h, "window": window}


class DetachedGRUWithWindow(GRUWithWindow):
    """The state of the GRU is detached at each step; attention over two steps hides it."""

    def carried(self, h):
        return h.detach()


class ReversedGradient(GRUWithWindow):
    """The value of the state is right, and its gradient has the wrong sign."""

    def carried(self, h):
        return 2 * h.detach() - h


class HalvedGradient(GRUWithWindow):
    """The value of the state is right, and its gradient is half as large."""

    def carried(self, h):
        return 0.5 * h.detach() + 0.5 * h


class IgnoresCommonEnds(Memory):
    """Nothing is cleared if all environments start an episode at once, as at a common time limit."""

    def forward(self, x, state, resets):
        resets = resets & ~resets.all(1, keepdim=True)
        return super().forward(x, state, resets)

    def write(self, x, h):
        h = torch.tanh(self.encode(x) + 0.9 * h)
        return h, h


class SeesCommonEnds(IgnoresCommonEnds):
    """The same memory with its resets."""

    def forward(self, x, state, resets):
        return Memory.forward(self, x, state, resets)


def _subject(kind):
    return lambda: subjects.Module(kind())


HEALTHY = {
    f"sparse-{kind.__name__}": _subject(kind)
    for kind in (
        FrameStack, CausalConvolution, EveryFourthStep, FirstObservation, OwnWindow, StepCounter, HardGate, MaxPool, EightSlots,
        PreviousObservation, DelayLine, ArgMax, Saturated, ReluRing, FrozenEncoderAndSkip,
    )
}  # fmt: skip
for _kind in (hf.WindowAttention, hf.MLSTM):
    HEALTHY[f"sparse-{_kind.__name__}"] = lambda kind=_kind: subjects.Module(kind(size.obs, 16))


def _broken(name, case, cause, kind, twin):
    return Broken(f"sparse-{name}", case, first_line(kind), cause, _subject(kind), TWINS[twin])


TWINS = {kind: _subject(kind) for kind in (GRUWithWindow, SeesCommonEnds)}
BROKEN = [
    _broken("detached", 12, "over-detached", DetachedGRUWithWindow, GRUWithWindow),
    _broken("reversed", 12, "gradient-distorted", ReversedGradient, GRUWithWindow),
    _broken("halved", 12, "gradient-distorted", HalvedGradient, GRUWithWindow),
    _broken("common-ends", 6, "common-ends-ignored", IgnoresCommonEnds, SeesCommonEnds),
]
