"""Agents of CleanRL's form. `Agent` is right; each subclass gets one thing wrong."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical

from broken.base import Broken, early_by_one, first_line, late_by_one, size
from holdfast.doctor.subjects import CleanRL


class Agent(nn.Module):
    """Right in everything."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(size.obs, size.hidden), nn.Tanh())
        self.lstm = nn.LSTM(size.hidden, size.hidden)
        self.actor = nn.Linear(size.hidden, size.actions)
        self.critic = nn.Linear(size.hidden, 1)

    def reset(self, state, done):
        return tuple(torch.where(done.bool().view(1, -1, 1), torch.zeros_like(s), s) for s in state)

    def sequence(self, x, state, done):
        outputs = []
        for x_t, done_t in zip(x, done):
            y, state = self.lstm(x_t.unsqueeze(0), self.reset(state, done_t))
            outputs.append(y)
        return torch.cat(outputs), state

    def rows(self, hidden, batch):
        return hidden.reshape(-1, batch, size.hidden)

    def get_states(self, x, state, done):
        batch = state[0].shape[1]
        y, state = self.sequence(self.rows(self.network(x), batch), state, done.reshape(-1, batch))
        return torch.flatten(y, 0, 1), state

    def get_value(self, x, state, done):
        return self.critic(self.get_states(x, state, done)[0])

    def get_action_and_value(self, x, state, done, action=None):
        hidden, state = self.get_states(x, state, done)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), state


class NeverResets(Agent):
    """Flags are ignored."""

    def reset(self, state, done):
        return state


class RunsTheSegmentAsOneEpisode(Agent):
    """Training runs a segment in one call, through its episode ends."""

    def sequence(self, x, state, done):
        return self.lstm(x, state) if len(x) > 1 else super().sequence(x, state, done)


class ResetsTheSegmentStartOnly(Agent):
    """Flags inside a segment are ignored."""

    def sequence(self, x, state, done):
        return self.lstm(x, self.reset(state, done[0]))


class ClearsHiddenButNotCell(Agent):
    """A reset clears h and leaves c."""

    def reset(self, state, done):
        return super().reset(state, done)[0], state[1]


class IndexesWithFlags(Agent):
    """0/1 flags are used as row numbers."""

    def reset(self, state, done):
        state = tuple(s.clone() for s in state)
        for s in state:
            s[:, done.long()] = 0
        return state


class ClearsEverybody(Agent):
    """One ended episode clears all environments."""

    def reset(self, state, done):
        return tuple(torch.zeros_like(s) for s in state) if done.any() else state


class MultipliesByZero(Agent):
    """A reset multiplies by 0, which keeps NaN."""

    def reset(self, state, done):
        return tuple((1 - done).view(1, -1, 1) * s for s in state)


class DropsOut(Agent):
    """Dropout is active in both legs."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(size.obs, size.hidden), nn.Dropout(0.2), nn.Tanh())


class NormalisesTheBatch(Agent):
    """BatchNorm is in training mode."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(size.obs, size.hidden), nn.BatchNorm1d(size.hidden), nn.Tanh())


class NormalisesTheLayer(Agent):
    """LayerNorm in its place is right."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(size.obs, size.hidden), nn.LayerNorm(size.hidden), nn.Tanh())


class Normalises(Agent):
    """Subtracts a running mean of the observations, which moves only when it is set."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size.obs))

    def get_states(self, x, state, done):
        return super().get_states(x - self.mean, state, done)


class NormaliserMovesWhileActing(Normalises):
    """Running statistics move during the rollout."""

    def get_states(self, x, state, done):
        if len(x) == state[0].shape[1]:
            self.mean.lerp_(x.mean(0), 0.05)
        return super().get_states(x, state, done)


class ReadsRowsAsTime(Agent):
    """[T * B] is reshaped to [B, T]."""

    def rows(self, hidden, batch):
        return hidden.reshape(batch, -1, size.hidden).transpose(0, 1)


class DetachesEveryStep(Agent):
    """The state is detached between the steps of a segment."""

    def reset(self, state, done):
        return tuple(s.detach() for s in super().reset(state, done))


class TrainsFromZeros(Agent):
    """Training starts each segment from an empty memory."""

    def sequence(self, x, state, done):
        if len(x) > 1:
            state = tuple(torch.zeros_like(s) for s in state)
        return super().sequence(x, state, done)


class TrainsLateByOne(Agent):
    """Training uses each flag one step late."""

    def sequence(self, x, state, done):
        if len(x) > 1:
            done = late_by_one(done)
        return super().sequence(x, state, done)


class TrainsEarlyByOne(Agent):
    """Training uses each flag one step early."""

    def sequence(self, x, state, done):
        if len(x) > 1:
            done = early_by_one(done)
        return super().sequence(x, state, done)


class ActsLateByOne(Agent):
    """Clears the state after the step in which it should have been fresh."""

    def sequence(self, x, state, done):
        outputs = []
        for x_t, done_t in zip(x, done):
            y, state = self.lstm(x_t.unsqueeze(0), state)
            state = self.reset(state, done_t)
            outputs.append(y)
        return torch.cat(outputs), state


class ClampsWhenActing(Agent):
    """The rollout clamps features, training does not."""

    def rows(self, hidden, batch):
        hidden = hidden if torch.is_grad_enabled() else hidden.clamp(-0.3, 0.3)
        return super().rows(hidden, batch)


class ActsInHalfPrecision(Agent):
    """The rollout rounds features to bfloat16, training does not."""

    def rows(self, hidden, batch):
        hidden = hidden if torch.is_grad_enabled() else hidden.bfloat16().float()
        return super().rows(hidden, batch)


class LeaksGradient(Agent):
    """The value is cleared, the gradient is not."""

    def reset(self, state, done):
        return tuple(s - s.detach() * done.view(1, -1, 1) for s in state)


class BootstrapsFromNothing(Agent):
    """Bootstrap values are computed with an empty memory."""

    def get_value(self, x, state, done):
        return super().get_value(x, tuple(torch.zeros_like(s) for s in state), done)


class AveragesEnvironments(Agent):
    """The mean over the environments is subtracted from each."""

    def rows(self, hidden, batch):
        rows = super().rows(hidden, batch)
        return rows - rows.mean(1, keepdim=True)


def _subject(agent_class, **arguments):
    return lambda: CleanRL(agent_class(), (size.obs,), **arguments)


def _only_terminated(terminated, truncated):
    return terminated


def _broken(name, case, cause, kind, twin=Agent, severity="error"):
    healthy = HEALTHY if twin is Agent else _subject(twin)
    return Broken(f"cleanrl-{name}", case, first_line(kind), cause, _subject(kind), healthy, severity)


HEALTHY = _subject(Agent)


BROKEN = [
    _broken("never-resets", 6, "never-resets", NeverResets),
    _broken("one-episode-in-training", 1, "reset-dropped-in-training", RunsTheSegmentAsOneEpisode),
    _broken("segment-start-only", 21, "reset-dropped-in-training", ResetsTheSegmentStartOnly),
    Broken(
        "cleanrl-truncation",
        3,
        "The script passes `terminated` as `done`.",
        "truncation-ignored",
        _subject(Agent, done=_only_terminated),
        HEALTHY,
    ),
    _broken("half-reset", 6, "partial-reset", ClearsHiddenButNotCell),
    _broken("index", 8, "index-not-mask", IndexesWithFlags),
    _broken("clears-everybody", 8, "resets-everybody", ClearsEverybody),
    _broken("nan", 7, "nan-survives", MultipliesByZero, severity="warning"),
    _broken("dropout", 18, "random-training-leg", DropsOut),
    _broken("batch-norm", 18, "batch-statistics", NormalisesTheBatch, NormalisesTheLayer),
    _broken("normaliser", 18, "normaliser-moved", NormaliserMovesWhileActing, Normalises),
    _broken("layout", 15, "layout-swapped", ReadsRowsAsTime),
    _broken("detached", 12, "over-detached", DetachesEveryStep),
    _broken("zeros", 1, "starts-from-zeros", TrainsFromZeros),
    _broken("late-in-training", 26, "late-by-one", TrainsLateByOne),
    _broken("early-in-training", 26, "early-by-one", TrainsEarlyByOne),
    _broken("late", 26, "late-by-one", ActsLateByOne),
    _broken("clamp", 18, "legs-differ", ClampsWhenActing),
    _broken("half-precision", 18, "legs-differ", ActsInHalfPrecision),
    _broken("gradient-leak", 6, "gradient-crosses-reset", LeaksGradient),
    _broken("bootstrap", 16, "bootstrap-after-reset", BootstrapsFromNothing),
    _broken("average", 8, "wrong-environment", AveragesEnvironments),
]
