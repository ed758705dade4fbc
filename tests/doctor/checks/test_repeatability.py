"""What moves is not taken for noise, and the report says what moved."""

import pytest
import torch

from broken.base import OBS
from broken.cleanrl_agents import Agent
from holdfast import doctor
from holdfast.doctor.subjects import CleanRL


class CachesAMean(Agent):
    """Subtracts a running mean that it keeps as a plain attribute; nothing in it is random."""

    def __init__(self, in_training_only=False):
        super().__init__()
        self.in_training_only, self.running, self.count = in_training_only, torch.zeros(OBS), 0

    def get_states(self, x, state, done):
        if torch.is_grad_enabled() or not self.in_training_only:
            self.count += 1
            self.running = self.running + (x.detach().mean(0) - self.running) / self.count
        return super().get_states(x - self.running, state, done)


@pytest.mark.parametrize("in_training_only", [False, True])
def test_a_cached_running_mean_is_not_repeatable_and_not_random(in_training_only):
    torch.manual_seed(4)
    report = doctor.examine(CleanRL(CachesAMean(in_training_only), (OBS,)))
    (found,) = [f for f in report.findings if f.severity == "error"]
    assert found.cause == "not-repeatable" and "`running`" in found.evidence, report.to_text()
