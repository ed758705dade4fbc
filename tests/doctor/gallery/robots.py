"""A runner for robots: actor and critic with a memory each, returns computed after a rollout, a play script."""

from __future__ import annotations

import copy

import torch
from torch import nn

from broken.base import size
from doctor.gallery.base import exhibit
from holdfast.doctor import Replay, Subject, SubjectStep


class Runner(Subject):
    """Right in everything. The memory is a dict of `[B, H]`, one row per environment."""

    def __init__(self):
        super().__init__((size.obs,))
        self.actor, self.critic = nn.GRUCell(size.obs, size.hidden), nn.GRUCell(size.obs, size.hidden)
        self.mean, self.value = nn.Linear(size.hidden, size.actions), nn.Linear(size.hidden, 1)
        self.memory = {}
        self.last_value = None

    def begin(self, num_envs):
        self.memory = {key: self.mean.weight.new_zeros(num_envs, size.hidden) for key in ("actor", "critic")}

    def reset(self, memory, dones):
        return {key: torch.where(dones[:, None], torch.zeros_like(h), h) for key, h in memory.items()}

    def forward(self, obs, memory):
        memory = {"actor": self.actor(obs, memory["actor"]), "critic": self.critic(obs, memory["critic"])}
        return torch.cat([self.mean(memory["actor"]), self.value(memory["critic"])], dim=-1), memory

    def step(self, obs, terminated, truncated, env_ids):
        with torch.no_grad():
            output, self.memory = self.forward(obs, self.reset(self.memory, terminated | truncated))
        self.last_value = output[:, -1]
        return SubjectStep(output)

    def mark(self):
        return {key: h.clone() for key, h in self.memory.items()}

    def state(self):
        return self.memory

    def replay(self, segment):
        memory, outputs = segment.start, []
        for obs, dones in zip(segment.obs, segment.terminated | segment.truncated):
            output, memory = self.forward(obs, Runner.reset(self, memory, dones))
            outputs.append(output)
        return Replay(torch.stack(outputs), state=memory)

    def peek_value(self, obs, env_ids):
        """What compute_returns uses for the observation after the last step."""
        with torch.no_grad():
            return self.value(self.critic(obs, self.memory["critic"][env_ids]))[:, 0]

    def evaluation(self):
        """The play script."""
        return copy.copy(self)


class ComputingReturnsMovesTheCritic(Runner):
    """Computing returns runs the critic once more and keeps the state that it leaves."""

    def peek_value(self, obs, env_ids):
        with torch.no_grad():
            critic = self.memory["critic"].clone()
            critic[env_ids] = self.critic(obs, critic[env_ids])
        self.memory = {**self.memory, "critic": critic}
        return self.value(critic[env_ids])[:, 0]


class BootstrapsWithTheValueBefore(Runner):
    """At a time limit, the value of the step before is taken for that of the final observation."""

    def peek_value(self, obs, env_ids):
        return self.last_value[env_ids]


class PlaysOn(Runner):
    """The play script steps environments that restart and never resets the policy."""

    def evaluation(self):
        return _NeverResets.like(self)


class DonesAreIntegers(Runner):
    """The wrapper passes dones as integers, so a reset by index clears rows 0 and 1."""

    def reset(self, memory, dones):
        memory = {key: h.clone() for key, h in memory.items()}
        for h in memory.values():
            h[dones.long()] = 0.0
        return memory


class NeverResets(Runner):
    """Detached between updates, but not cleared when a robot is put back to its start."""

    def reset(self, memory, dones):
        return memory

    def replay(self, segment):
        none = torch.zeros_like(segment.terminated)
        return super().replay(segment.with_(terminated=none, truncated=none))


class _NeverResets(NeverResets):
    @classmethod
    def like(cls, other):
        mine = cls.__new__(cls)
        vars(mine).update(vars(other))
        return mine


EXHIBITS = [
    exhibit(
        "rsl-rl-206", 16, "bootstrap-moves-memory", "https://github.com/leggedrobotics/rsl_rl/pull/206",
        ComputingReturnsMovesTheCritic, Runner,
    ),
    exhibit(
        "rsl-rl-151", 16, "bootstrap-of-another-step", "https://github.com/leggedrobotics/rsl_rl/issues/151",
        BootstrapsWithTheValueBefore, Runner,
    ),
    exhibit(
        "isaaclab-3837", 27, "eval-never-resets", "https://github.com/isaac-sim/IsaacLab/issues/3837", PlaysOn, Runner,
    ),
    exhibit(
        "isaaclab-888", 8, "index-not-mask", "https://github.com/isaac-sim/IsaacLab/issues/888", DonesAreIntegers, Runner,
    ),
    exhibit(
        "extreme-parkour-12", 6, "never-resets", "https://github.com/chengxuxin/extreme-parkour/issues/12",
        NeverResets, Runner,
    ),
]  # fmt: skip
