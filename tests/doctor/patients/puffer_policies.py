"""Policies of PufferLib's form: a state dict, `forward_eval` for a step and `forward` for a segment."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.doctor.subjects import Puffer
from patients.base import ACTIONS, HIDDEN, OBS, Patient


class Policy(nn.Module):
    hidden_size = HIDDEN

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(OBS, HIDDEN)
        self.cell = nn.LSTMCell(HIDDEN, HIDDEN)
        self.actor = nn.Linear(HIDDEN, ACTIONS)
        self.critic = nn.Linear(HIDDEN, 1)

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
            h = c = obs.new_zeros(rows, HIDDEN)
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
    def reset(self, h, c, done):
        return h, c


class ReshapesInsteadOfTransposing(Policy):
    def time_first(self, x, rows, steps):
        return x.reshape(steps, rows, -1)


class HandsTheStateOn(Policy):
    """Every environment gets the state of the one before it."""

    def forward_eval(self, obs, state):
        result = super().forward_eval(obs, state)
        state["lstm_h"], state["lstm_c"] = state["lstm_h"].roll(1, 0), state["lstm_c"].roll(1, 0)
        return result


def _subject(policy_class, **arguments):
    return lambda: Puffer(policy_class(), (OBS,), **arguments)


HEALTHY = _subject(Policy)

PATIENTS = [
    Patient("puffer-never-resets", 6, "never-resets", _subject(NeverResets), HEALTHY),
    Patient("puffer-zeros", 1, "starts-from-zeros", _subject(Policy, start="nothing"), HEALTHY),
    Patient("puffer-layout", 15, "layout-swapped", _subject(ReshapesInsteadOfTransposing), HEALTHY),
    Patient("puffer-neighbour", 8, "wrong-environment", _subject(HandsTheStateOn), HEALTHY),
]
