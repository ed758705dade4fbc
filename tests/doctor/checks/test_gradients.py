"""Truncated backpropagation is an error when it was forgotten, and a note when it was declared."""

import pytest
import torch

from broken.base import OBS
from broken.cleanrl_agents import Agent, DetachesEveryStep
from holdfast import doctor
from holdfast.doctor.subjects import CleanRL


class CutsEvery(Agent):
    """Training detaches the state after every `k` steps."""

    def __init__(self, k):
        super().__init__()
        self.k = k

    def sequence(self, x, state, done):
        outputs = []
        for t, (x_t, done_t) in enumerate(zip(x, done)):
            state = tuple(s.detach() for s in state) if t % self.k == 0 else state
            y, state = self.lstm(x_t.unsqueeze(0), self.reset(state, done_t))
            outputs.append(y)
        return torch.cat(outputs), state


def _causes(agent, **options):
    report = doctor.examine(CleanRL(agent, (OBS,)), **options)
    return report.ok, [f.cause for f in report.findings if f.severity != "warning"]


def test_a_cut_is_an_error_unless_it_is_declared():
    assert _causes(CutsEvery(4)) == (False, ["over-detached"])
    assert _causes(CutsEvery(4), bptt=4) == (True, ["truncated-bptt"])
    assert _causes(CutsEvery(1), bptt=1) == (True, ["truncated-bptt"])


def test_a_cut_before_the_declared_length_is_an_error():
    assert _causes(CutsEvery(4), bptt=8) == (False, ["over-detached"])
    assert _causes(DetachesEveryStep(), bptt=2) == (False, ["over-detached"])


@pytest.mark.parametrize("bptt", [4, 100])
def test_a_declaration_changes_nothing_for_a_policy_that_does_not_cut(bptt):
    assert _causes(Agent(), bptt=bptt) == (True, [])


def test_the_declaration_of_a_subject_counts_and_stays():
    subject = CleanRL(CutsEvery(4), (OBS,))
    subject.bptt = 4
    assert doctor.examine(subject).ok
    assert not doctor.examine(subject, bptt=8).ok
    assert subject.bptt == 4
