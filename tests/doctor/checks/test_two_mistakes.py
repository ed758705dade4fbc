"""Two mistakes at once are two errors, both named, whichever hides the other at first sight."""

import pytest
import torch

from broken import cleanrl_agents as agents
from broken import own_loops as loops
from broken.base import OBS
from holdfast import doctor
from holdfast.doctor.subjects import CleanRL


def _only_terminated(terminated, truncated):
    return terminated


def _agent(*kinds, **arguments):
    return CleanRL(type("Both", kinds, {})(), (OBS,), **arguments)


def _loop(*kinds):
    return type("Both", kinds, {})()


CASES = {
    # what training starts from, and how it resets
    "zeros, early": (lambda: _loop(_FromZeros, loops.FlagsAfterTheStep), "starts-from-zeros early-by-one"),
    "zeros, first flag": (lambda: _agent(agents.TrainsFromZeros, done=_only_terminated), "truncation-ignored starts-from-zeros"),
    "stored late, flags early": (lambda: _loop(loops.StoresAfterTheStep, loops.FlagsAfterTheStep), "late-by-one early-by-one"),
    "stored at the end, first flag": (
        lambda: _loop(loops.StartsFromTheEnd, loops.LosesTheFirstFlag),
        "wrong-start-state boundary-lost-at-segment-start",
    ),
    # one in each leg
    "never, zeros": (lambda: _agent(agents.NeverResets, agents.TrainsFromZeros), "never-resets starts-from-zeros"),
    "half, zeros": (lambda: _agent(agents.ClearsHiddenButNotCell, agents.TrainsFromZeros), "partial-reset starts-from-zeros"),
    "truncation, late": (lambda: _agent(agents.ActsLateByOne, done=_only_terminated), "truncation-ignored late-by-one"),
    "aliased, early": (lambda: _loop(loops.StoresTheLiveState, loops.FlagsAfterTheStep), "start-state-aliased early-by-one"),
    # values and gradients
    "never, detached": (lambda: _agent(_Detaches, agents.NeverResets), "never-resets over-detached"),
    # one that the doctor takes out of its copy, and another
    "dropout, zeros": (lambda: _agent(agents.DropsOut, agents.TrainsFromZeros), "random-training-leg starts-from-zeros"),
    "batch norm, never": (lambda: _agent(agents.NormalisesTheBatch, agents.NeverResets), "batch-statistics never-resets"),
    # the legs, and what is around them
    "early, checkpoint": (lambda: _loop(loops.FlagsAfterTheStep, loops.SavesNoMemory), "early-by-one memory-lost-on-resume"),
    "place, peek": (lambda: _loop(loops.KeyedByPlace, loops.PeeksAndKeeps), "wrong-environment bootstrap-moves-memory"),
    "late start, evaluation": (lambda: _loop(loops.StoresAfterTheStep, loops.PlaysWithoutResets), "late-by-one eval-never-resets"),
}  # fmt: skip


class _FromZeros(loops.Loop):
    def start(self, segment):
        return torch.zeros_like(segment.start["h"])


class _Detaches(agents.Agent):
    def sequence(self, x, state, done):
        outputs = []
        for x_t, done_t in zip(x, done):
            y, state = self.lstm(x_t.unsqueeze(0), tuple(s.detach() for s in self.reset(state, done_t)))
            outputs.append(y)
        return torch.cat(outputs), state


@pytest.mark.parametrize(("make", "causes"), CASES.values(), ids=CASES)
def test_both_mistakes_are_named(make, causes):
    torch.manual_seed(2)
    report = doctor.examine(make())
    assert {f.cause for f in report.findings if f.severity == "error"} == set(causes.split()), report.to_text()
