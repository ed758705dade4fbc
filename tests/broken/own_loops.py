"""Training loops written by hand, each as its own subject: memory by environment id, buffers, checkpoints."""

from __future__ import annotations

import copy

import torch
from torch import nn

from broken.base import Broken, early_by_one, first_line, size
from holdfast.doctor import Replay, Subject, SubjectStep


class Loop(Subject):
    """A GRU cell with a linear value, one row of memory per environment id. Right in everything."""

    takes_env_ids = True
    flags_optional = True
    pads = True

    def __init__(self):
        super().__init__((size.obs,))
        self.cell = nn.GRUCell(size.obs, size.hidden)
        self.value = nn.Linear(size.hidden, 1)
        self.rows = {}

    def output(self, h):
        return torch.cat([h, self.value(h)], dim=-1)

    def begin(self, num_envs):
        self.rows = {"h": torch.zeros(num_envs, size.hidden)}

    def read(self, env_ids):
        return self.rows["h"][env_ids]

    def write(self, env_ids, h):
        rows = self.rows["h"].clone()
        rows[env_ids] = h
        self.rows = {"h": rows}

    def no_flags(self, count):
        return torch.zeros(count, dtype=torch.bool)

    def step(self, obs, terminated, truncated, env_ids):
        first = self.no_flags(len(obs)) if terminated is None else terminated | truncated
        with torch.no_grad():
            h = self.cell(obs, torch.where(first[:, None], torch.zeros(()), self.read(env_ids)))
            self.write(env_ids, h)
            return SubjectStep(self.output(h))

    def mark(self):
        return {"h": self.rows["h"].clone()}

    def state(self):
        return self.rows["h"]

    def start(self, segment):
        return segment.start["h"]

    def flags(self, segment):
        return segment.terminated | segment.truncated

    def clear(self, first, h):
        return torch.where(first[:, None], torch.zeros(()), h)

    def last_real(self, t, lengths, old, new):
        return torch.where((t < lengths)[:, None], new, old)

    def replay(self, segment):
        h, outputs, lengths = self.start(segment), [], segment.lengths
        for t, (obs, first) in enumerate(zip(segment.obs, self.flags(segment))):
            new = self.cell(obs, self.clear(first, h))
            outputs.append(self.output(new))
            h = new if lengths is None else self.last_real(t, lengths, h, new)
        return Replay(torch.stack(outputs), state=h)

    def peek_value(self, obs, env_ids):
        with torch.no_grad():
            return self.value(self.cell(obs, self.read(env_ids)))[:, 0]

    def evaluation(self):
        return copy.copy(self)

    def second_agent(self):
        return copy.copy(self)

    def reset_memory(self):
        self.begin(len(self.rows["h"]))

    def save(self):
        return self.rows

    def load(self, checkpoint):
        self.rows = checkpoint


class KeyedBySlice(Loop):
    """Finds rows by the smallest id, as if the environments of a call were always neighbours in order."""

    def read(self, env_ids):
        first = int(env_ids.min())
        return self.rows["h"][first : first + len(env_ids)] if len(env_ids) > 1 else super().read(env_ids)

    def write(self, env_ids, h):
        first = int(env_ids.min())
        super().write(
            torch.arange(first, min(first + len(env_ids), len(self.rows["h"]))), h[: len(self.rows["h"]) - first]
        )


class KeyedByPlace(Loop):
    """Finds rows by their place in the batch."""

    def read(self, env_ids):
        return super().read(torch.arange(len(env_ids)))

    def write(self, env_ids, h):
        super().write(torch.arange(len(env_ids)), h)


class StoresTheLiveState(Loop):
    """The stored start state is the live one."""

    def write(self, env_ids, h):
        self.rows["h"][env_ids] = h

    def mark(self):
        return self.rows


class StoresAfterTheStep(Loop):
    """The start state is stored after the first step."""

    def start(self, segment):
        return segment.marks[1]["h"]


class FlagsAfterTheStep(Loop):
    """Stores the flag that came out of a step, and uses it for that step."""

    def flags(self, segment):
        return early_by_one(segment.terminated | segment.truncated)


class LosesTheFirstFlag(Loop):
    """The flag on a segment's first step is lost."""

    def flags(self, segment):
        flags = (segment.terminated | segment.truncated).clone()
        flags[0] = False
        return flags


class StartsFromTheNeighbor(Loop):
    """Training starts each row from the state of its neighbor."""

    def start(self, segment):
        return segment.start["h"].roll(1, 0)


class StartsFromTheEnd(Loop):
    """The state stored with a segment is the one after its last step."""

    def start(self, segment):
        return segment.marks[-1]["h"]


class ResetsWithoutFlags(Loop):
    """Missing flags mean a reset at every step."""

    def no_flags(self, count):
        return torch.ones(count, dtype=torch.bool)


class PadsThrough(Loop):
    """Padded steps change the state."""

    def last_real(self, t, lengths, old, new):
        return new


class SharesRows(Loop):
    """The network holds the memory, and every agent uses the network."""

    def __init__(self):
        super().__init__()
        self.cell.rows = {}

    def begin(self, num_envs):
        self.cell.rows["h"] = torch.zeros(num_envs, size.hidden)

    def read(self, env_ids):
        return self.cell.rows["h"][env_ids]

    def write(self, env_ids, h):
        rows = self.cell.rows["h"].clone()
        rows[env_ids] = h
        self.cell.rows["h"] = rows

    def mark(self):
        return {"h": self.cell.rows["h"].clone()}

    def state(self):
        return self.cell.rows["h"]

    def reset_memory(self):
        self.begin(len(self.cell.rows["h"]))

    def save(self):
        return dict(self.cell.rows)

    def load(self, checkpoint):
        self.cell.rows = checkpoint


class _NoFlags(Loop):
    def step(self, obs, terminated, truncated, env_ids):
        return Loop.step(self, obs, torch.zeros_like(terminated), torch.zeros_like(truncated), env_ids)


class _AllFlags(Loop):
    def step(self, obs, terminated, truncated, env_ids):
        return Loop.step(self, obs, torch.ones_like(terminated), truncated, env_ids)


class _OnlyTerminated(Loop):
    def step(self, obs, terminated, truncated, env_ids):
        return Loop.step(self, obs, terminated, torch.zeros_like(truncated), env_ids)


class PlaysWithoutResets(Loop):
    """The evaluation loop ignores the flags."""

    evaluation_class = _NoFlags

    def evaluation(self):
        other = self.evaluation_class()
        other.cell, other.value = self.cell, self.value
        return other


class PlaysWithoutMemory(PlaysWithoutResets):
    """The evaluation loop drops the state."""

    evaluation_class = _AllFlags


class PlaysOnTimeLimits(PlaysWithoutResets):
    """The evaluation loop ignores truncations."""

    evaluation_class = _OnlyTerminated


class SavesNoMemory(Loop):
    """A resumed run starts from an empty memory."""

    def load(self, checkpoint):
        self.begin(len(checkpoint["h"]))


class PeeksAndKeeps(Loop):
    """Asking for a bootstrap value advances the memory."""

    def peek_value(self, obs, env_ids):
        value = super().peek_value(obs, env_ids)
        with torch.no_grad():
            self.write(env_ids, self.cell(obs, self.read(env_ids)))
        return value


class PeeksAtFirstRows(Loop):
    """Bootstrap values of some environments use the first rows."""

    def peek_value(self, obs, env_ids):
        return super().peek_value(obs, torch.arange(len(env_ids)))


class Accumulates(Loop):
    """An integrator: nothing is ever forgotten inside an episode."""

    def __init__(self):
        super().__init__()
        self.cell = _Integrator()


class _Integrator(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(size.obs, size.hidden)

    def forward(self, obs, h):
        return h + self.weight(obs).abs()


class CachedLinear(nn.Linear):
    """Keeps its weights in a lower precision from one call to the next, as autocast does."""

    cached = None

    def forward(self, x):
        if self.cached is None or not self.usable():
            self.cached = (self.weight.bfloat16().float(), self.bias.bfloat16().float())
        return nn.functional.linear(x, *self.cached)

    def usable(self):
        return True


class CarefullyCachedLinear(CachedLinear):
    def usable(self):
        return not torch.is_grad_enabled() and not self.cached[0].requires_grad


class TrainsOnCachedWeights(Loop):
    """The rollout, without gradients, fills the cache; training then uses weights that have no gradient."""

    linear = CachedLinear

    def __init__(self):
        super().__init__()
        self.cell, self.value = _LinearCell(self.linear), self.linear(size.hidden, 1)


class TrainsOnFreshWeights(TrainsOnCachedWeights):
    linear = CarefullyCachedLinear


class TrainingWritesMemory(Loop):
    """Training leaves its last state in the memory."""

    def replay(self, segment):
        result = super().replay(segment)
        self.rows = {"h": result.state.detach()}
        return result


class TrainingReadsMemory(TrainingWritesMemory):
    """Training starts each segment from the current memory."""

    def start(self, segment):
        return self.rows["h"]


class InferenceStart(Loop):
    """Makes its first state under inference mode and starts training from it."""

    def begin(self, num_envs):
        with torch.inference_mode():
            self.rows = {"h": torch.zeros(num_envs, size.hidden)}

    def mark(self):
        return {"h": self.rows["h"]}

    def flags(self, segment):
        flags = super().flags(segment)
        return [None if not first.any() else first for first in flags]

    def clear(self, first, h):
        return h if first is None else super().clear(first, h)


class _LinearCell(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.inner = linear(size.obs + size.hidden, size.hidden)

    def forward(self, obs, h):
        return torch.tanh(self.inner(torch.cat([obs, h], dim=-1)))


def _broken(name, case, cause, kind, twin=Loop, severity="error"):
    return Broken(f"own-{name}", case, first_line(kind), cause, kind, twin, severity)


BROKEN = [
    _broken("slice", 8, "wrong-environment", KeyedBySlice),
    _broken("place", 8, "wrong-environment", KeyedByPlace),
    _broken("aliased", 26, "start-state-aliased", StoresTheLiveState),
    _broken("stored-late", 26, "late-by-one", StoresAfterTheStep),
    _broken("flags-after", 26, "early-by-one", FlagsAfterTheStep),
    _broken("first-flag", 2, "boundary-lost-at-segment-start", LosesTheFirstFlag),
    _broken("neighbor", 8, "wrong-environment", StartsFromTheNeighbor),
    _broken("stored-at-the-end", 1, "wrong-start-state", StartsFromTheEnd),
    _broken("no-flags", 4, "missing-flags-reset", ResetsWithoutFlags),
    _broken("padding", 28, "padding-leaks", PadsThrough),
    _broken("agents", 13, "shared-between-agents", SharesRows),
    _broken("eval-never-resets", 27, "eval-never-resets", PlaysWithoutResets),
    _broken("eval-memoryless", 27, "eval-memoryless", PlaysWithoutMemory),
    _broken("eval-truncation", 27, "truncation-ignored", PlaysOnTimeLimits),
    _broken("checkpoint", 10, "memory-lost-on-resume", SavesNoMemory),
    _broken("peek", 16, "bootstrap-moves-memory", PeeksAndKeeps),
    _broken("peek-order", 16, "wrong-environment", PeeksAtFirstRows),
    _broken("accumulates", 29, "state-grows", Accumulates, severity="warning"),
    _broken("training-writes", 1, "training-moves-memory", TrainingWritesMemory),
    _broken("training-reads", 1, "training-moves-memory", TrainingReadsMemory),
    _broken("inference", 20, "inference-tensor-state", InferenceStart),
    _broken("cached-weights", 19, "gradients-severed", TrainsOnCachedWeights, TrainsOnFreshWeights),
]
