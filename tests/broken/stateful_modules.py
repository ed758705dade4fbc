"""Policies that keep their state as an attribute of the module."""

from __future__ import annotations

import torch
from torch import nn

from broken.base import Broken, first_line, size
from holdfast.doctor.subjects import Stateful


class Policy(nn.Module):
    """Steps with `forward`, trains on `[T, B, ...]` with `sequence`; detaches what it keeps."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(size.obs, size.hidden)
        self.head = nn.Linear(size.hidden, size.actions + 1)
        self.lstm_hidden = None

    def fresh(self, rows):
        return tuple(self.head.weight.new_zeros(1, rows, size.hidden) for _ in range(2))

    def keep(self, state):
        self.lstm_hidden = tuple(s.detach() for s in state)

    def state_for(self, rows):
        if self.lstm_hidden is None or self.lstm_hidden[0].shape[1] != rows:
            return self.fresh(rows)
        return self.lstm_hidden

    def reset(self, state, mask):
        return tuple(torch.where(mask.view(1, -1, 1), torch.zeros_like(s), s) for s in state)

    def forward(self, obs, done):
        y, state = self.lstm(obs.unsqueeze(0), self.reset(self.state_for(len(obs)), done))
        self.keep(state)
        return self.head(y[0])

    def sequence(self, obs, done):
        state, outputs = self.state_for(obs.shape[1]), []
        for obs_t, done_t in zip(obs, done):
            y, state = self.lstm(obs_t.unsqueeze(0), self.reset(state, done_t))
            outputs.append(y)
        self.keep(state)
        return self.head(torch.cat(outputs)).flatten(0, 1)

    def forget(self):
        self.lstm_hidden = None


class LivePolicy(Policy):
    """Trains through live steps: `forward` with gradients, and `cut` between segments."""

    def keep(self, state):
        self.lstm_hidden = state

    def cut(self):
        if self.lstm_hidden is not None:
            self.lstm_hidden = tuple(s.detach() for s in self.lstm_hidden)


class NeverCuts(LivePolicy):
    """The state keeps its graph from segment to segment."""

    def cut(self):
        pass


class CutsEveryStep(LivePolicy):
    """The state is detached at every step."""

    def keep(self, state):
        self.lstm_hidden = tuple(s.detach() for s in state)


class MadeForFive(Policy):
    """The state is made once, for five environments."""

    def __init__(self):
        super().__init__()
        self.lstm_hidden = self.fresh(size.envs)

    def state_for(self, rows):
        return tuple(s.to(self.head.weight) for s in self.lstm_hidden)

    def forget(self):
        self.lstm_hidden = self.fresh(size.envs)


class KeepsTheOldBatch(Policy):
    """Makes its state on the first call and never again."""

    def state_for(self, rows):
        return self.fresh(rows) if self.lstm_hidden is None else self.lstm_hidden

    def forget(self):
        pass


class ForgetsNothing(Policy):
    """The method that clears the memory does nothing."""

    def forget(self):
        pass


class StateInBuffers(Policy):
    """The state is kept in buffers, so state_dict() holds it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("h", None)
        self.register_buffer("c", None)

    def state_for(self, rows):
        self.lstm_hidden = None if self.h is None else (self.h, self.c)
        return super().state_for(rows)

    def keep(self, state):
        self.h, self.c = (s.detach() for s in state)

    def forget(self):
        self.h = self.c = None


class StateInUnsavedBuffers(StateInBuffers):
    """The state is kept in non-persistent buffers, which is right."""

    def __init__(self):
        super().__init__()
        self.register_buffer("h", None, persistent=False)
        self.register_buffer("c", None, persistent=False)


class DropsItsState(Policy):
    """Every call starts from an empty memory."""

    def state_for(self, rows):
        return self.fresh(rows)


class ReadsRowsAsTime(Policy):
    """nn.LSTM is called with a 2-D input, which it takes for one sequence."""

    def forward(self, obs, done):
        state = self.reset(self.state_for(len(obs)), done)
        y, new = self.lstm(obs, tuple(s[:, 0] for s in state))
        self.keep(tuple(s.unsqueeze(1).expand(1, len(obs), size.hidden) for s in new))
        return self.head(y)


class SinglePrecisionOnly(Policy):
    """The first state is always float32."""

    def fresh(self, rows):
        return tuple(torch.zeros(1, rows, size.hidden, dtype=torch.float32) for _ in range(2))


class ResetsOnlyFirstLayer(Policy):
    """A reset clears the first of two layers."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(size.obs, size.hidden, num_layers=2)

    def fresh(self, rows):
        return tuple(self.head.weight.new_zeros(2, rows, size.hidden) for _ in range(2))

    def reset(self, state, mask):
        first = torch.tensor([True, False]).view(2, 1, 1)
        return tuple(torch.where(mask.view(1, -1, 1) & first, torch.zeros_like(s), s) for s in state)


class TwoLayers(ResetsOnlyFirstLayer):
    """A reset clears both layers, which is right."""

    def reset(self, state, mask):
        return Policy.reset(self, state, mask)


def _subject(policy_class, **arguments):
    arguments = {"reset": "done", "train": "sequence", "forget": "forget", **arguments}
    return lambda: Stateful(policy_class(), observation_space=(size.obs,), **arguments)


def _broken(name, case, cause, kind, twin=Policy, severity="error", **arguments):
    healthy = HEALTHY if twin is Policy and not arguments else _subject(twin, **arguments)
    return Broken(f"stateful-{name}", case, first_line(kind), cause, _subject(kind, **arguments), healthy, severity)


HEALTHY = _subject(Policy)


_LIVE = {"train": None, "no_grad": False, "detach": "cut"}
_BUFFERS = {"hidden": ("h", "c")}

BROKEN = [
    _broken("graph", 11, "graph-kept", NeverCuts, LivePolicy, **_LIVE),
    _broken("cut-every-step", 12, "over-detached", CutsEveryStep, LivePolicy, **_LIVE),
    _broken("made-for-five", 9, "batch-size-baked-in", MadeForFive),
    _broken("old-batch", 9, "batch-size-baked-in", KeepsTheOldBatch, **{"forget": None}),
    _broken("forgets-nothing", 25, "reset-does-nothing", ForgetsNothing),
    _broken("buffers", 10, "memory-in-state-dict", StateInBuffers, StateInUnsavedBuffers, **_BUFFERS),
    _broken("drops-its-state", 4, "memoryless", DropsItsState),
    _broken("layout", 15, "layout-swapped", ReadsRowsAsTime),
    _broken("single-precision", 20, "dtype-baked-in", SinglePrecisionOnly, severity="warning"),
    _broken("half-reset", 6, "partial-reset", ResetsOnlyFirstLayer, TwoLayers),
]
