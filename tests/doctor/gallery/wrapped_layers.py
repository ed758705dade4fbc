"""Agents around torch.nn's LSTM whose own layer cuts a segment at episode starts, and a PPO script around one."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from broken.base import size
from doctor.gallery.base import exhibit
from holdfast.doctor import Replay, Subject, SubjectStep


class Wrapped(Subject):
    """An LSTM that is run in pieces, from one step where some episode starts to the next."""

    def __init__(self, num_envs=1):
        super().__init__((size.obs,))
        self.num_envs = num_envs
        self.lstm, self.value = nn.LSTM(size.obs, size.hidden), nn.Linear(size.hidden, 1)
        self.hidden = None

    def starts(self, first):
        """The steps after the first where some episode starts. first [T, B]."""
        return [t for t in range(1, len(first)) if bool(first[t].any())]

    def run(self, obs, hidden, first):
        cuts, outputs = [0, *self.starts(first), len(first)], []
        for a, b in pairwise(cuts):
            hidden = tuple(h.masked_fill(first[a].view(1, -1, 1), 0.0) for h in hidden)
            y, hidden = self.lstm(obs[a:b], hidden)
            outputs.append(y)
        y = torch.cat(outputs)
        return torch.cat([y, self.value(y)], -1), hidden

    def begin(self, num_envs):
        self.hidden = tuple(self.value.weight.new_zeros(1, num_envs, size.hidden) for _ in "hc")

    def step(self, obs, terminated, truncated, env_ids):
        with torch.no_grad():
            output, self.hidden = self.run(obs[None], self.hidden, (terminated | truncated)[None])
        return SubjectStep(output[0])

    def mark(self):
        return tuple(h.clone() for h in self.hidden)

    def state(self):
        return self.hidden

    def replay(self, segment):
        output, _ = self.run(segment.obs, self.training_start(segment), segment.terminated | segment.truncated)
        return Replay(output)

    def training_start(self, segment):
        return segment.start

    def rows(self, env_ids):
        return tuple(h[:, env_ids] for h in self.hidden)

    def peek_value(self, obs, env_ids):
        with torch.no_grad():
            y, _ = self.lstm(obs[None], self.rows(env_ids))
            return self.value(y)[0, :, 0]


class SqueezesTheFlags(Wrapped):
    """Squeezes the flags of a segment before it looks for episode starts: with one sequence there is no axis left to look along."""

    def starts(self, first):
        if len(first) == 1:
            return []
        found = first.squeeze()[1:].any(dim=-1).nonzero().squeeze()
        return [int(found) + 1] if found.dim() == 0 else (found + 1).tolist() if found.numel() else []


class Script(Wrapped):
    """A PPO script around the same layer, with several environments."""

    def __init__(self):
        super().__init__(num_envs=5)


class TrainsFromTheFinalState(Script):
    """Training starts from the state that the rollout ended with."""

    def training_start(self, segment):
        return segment.marks[-1]


class ResetsBeforeTheFinalValue(Script):
    """The state is cleared for environments that ended before the value of their final observation is computed."""

    def rows(self, env_ids):
        return tuple(torch.zeros_like(h) for h in super().rows(env_ids))


RL_GAMES = "https://github.com/Denys88/rl_games/blob/09f6fc4/rl_games/common/layers/recurrent.py"
MIKASA = "https://github.com/CognitiveAISystems/MIKASA-Robo/blob/49e75d0/baselines/ppo/ppo_memtasks_lstm.py"
EXHIBITS = [
    exhibit("rl-games", 12, "reset-dropped-in-training", RL_GAMES, SqueezesTheFlags, Wrapped),
    exhibit("mikasa-start", 10, "wrong-start-state", MIKASA, TrainsFromTheFinalState, Script),
    exhibit("mikasa-value", 16, "bootstrap-after-reset", MIKASA, ResetsBeforeTheFinalValue, Script),
]
