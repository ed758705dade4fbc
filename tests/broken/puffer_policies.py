"""Policies of PufferLib's form: a state dict, `forward_eval` for a step and `forward` for a segment."""

from __future__ import annotations

import torch
from torch import nn

from broken.base import Broken, first_line, size
from holdfast.doctor.subjects import Puffer


class Policy(nn.Module):
    """Right in everything."""

    def __init__(self):
        super().__init__()
        self.hidden_size = size.hidden
        self.encoder = nn.Linear(size.obs, size.hidden)
        self.cell = nn.LSTMCell(size.hidden, size.hidden)
        self.actor = nn.Linear(size.hidden, size.actions)
        self.critic = nn.Linear(size.hidden, 1)

    def reset(self, h, c, done):
        zeros = torch.zeros_like(h)
        return torch.where(done[:, None], zeros, h), torch.where(done[:, None], zeros, c)

    def forward_eval(self, obs, state):
        h, c = self.cell(torch.tanh(self.encoder(obs)), self.reset(state["lstm_h"], state["lstm_c"], state["done"]))
        state["lstm_h"], state["lstm_c"] = h, c
        return self.actor(h), self.critic(h)

    def forward(self, obs, state):
        rows, steps = obs.shape[:2]
        h, c = state["lstm_h"], state["lstm_c"]
        if h is None:
            h = c = obs.new_zeros(rows, size.hidden)
        x = self.time_first(torch.tanh(self.encoder(obs)), rows, steps)
        outputs = []
        for t in range(steps):
            h, c = self.cell(x[t], self.reset(h, c, state["done"][:, t]))
            outputs.append(h)
        y = torch.stack(outputs, 1).flatten(0, 1)
        return self.actor(y), self.critic(y).view(rows, steps)

    def time_first(self, x, rows, steps):
        return x.transpose(0, 1)


class NeverResets(Policy):
    """Flags are ignored."""

    def reset(self, h, c, done):
        return h, c


class ReshapesInsteadOfTransposing(Policy):
    """[B, T] is reshaped to [T, B]."""

    def time_first(self, x, rows, steps):
        return x.reshape(steps, rows, -1)


class HandsTheStateOn(Policy):
    """Every environment gets the state of its neighbor."""

    def forward_eval(self, obs, state):
        result = super().forward_eval(obs, state)
        state["lstm_h"], state["lstm_c"] = state["lstm_h"].roll(1, 0), state["lstm_c"].roll(1, 0)
        return result


def _subject(policy_class, **arguments):
    return lambda: Puffer(policy_class(), (size.obs,), **arguments)


HEALTHY = _subject(Policy)


def _broken(name, case, cause, kind):
    return Broken(f"puffer-{name}", case, first_line(kind), cause, _subject(kind), HEALTHY)


BROKEN = [
    _broken("never-resets", 6, "never-resets", NeverResets),
    Broken(
        "puffer-zeros",
        1,
        "The trainer starts each segment from nothing.",
        "starts-from-zeros",
        _subject(Policy, start="nothing"),
        HEALTHY,
    ),
    _broken("layout", 15, "layout-swapped", ReshapesInsteadOfTransposing),
    _broken("neighbor", 8, "wrong-environment", HandsTheStateOn),
]
