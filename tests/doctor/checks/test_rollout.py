"""An incomplete reset is named as one, for any weights."""

import pytest
import torch

from broken.base import OBS
from broken.cleanrl_agents import Agent
from holdfast import doctor
from holdfast.doctor.subjects import CleanRL


class ClearsOne(Agent):
    def __init__(self, which):
        super().__init__()
        self.which = which

    def reset(self, state, done):
        cleared = super().reset(state, done)
        return tuple(new if i == self.which else old for i, (old, new) in enumerate(zip(state, cleared)))


@pytest.mark.parametrize("which", [0, 1], ids=["h but not c", "c but not h"])
def test_half_a_reset_is_never_taken_for_mixed_environments(which):
    for seed in range(5):
        torch.manual_seed(seed)
        report = doctor.examine(CleanRL(ClearsOne(which), (OBS,)))
        assert [f.cause for f in report.findings if f.severity == "error"] == ["partial-reset"], (
            seed,
            report.to_text(),
        )
