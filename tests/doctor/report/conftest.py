"""Reports of three agents: one healthy, one that leaks, one that detaches too much."""

import pytest
import torch

from broken.base import OBS
from broken.cleanrl_agents import Agent, DetachesEveryStep, RunsTheSegmentAsOneEpisode
from holdfast import doctor
from holdfast.doctor import subjects


@pytest.fixture(scope="session")
def reports():
    torch.manual_seed(1)
    kinds = {"healthy": Agent, "leaking": RunsTheSegmentAsOneEpisode, "detached": DetachesEveryStep}
    return {name: doctor.examine(subjects.CleanRL(kind(), (OBS,))) for name, kind in kinds.items()}
