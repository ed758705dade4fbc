"""The captured rollout against `Collector`, played on the CPU: the same function without the capture."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast import envs
from holdfast.rollout.collector import Collector
from holdfast.rollout.segment import PER_STEP, Segment
from holdfast.state import leaves
from uncaptured import UncapturedCollector


def segments(kind: type[Collector], task: str, seed: int) -> list[Segment]:
    env = envs.make(f"holdfast/{task}-v0", 6)
    torch.manual_seed(seed)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8, normalize_value=True)
    collector = kind(env, policy, 10, bptt=5, gamma=0.9, seed=seed)
    collector.reward_scale = 0.5
    torch.manual_seed(seed)
    return [collector.rollout().map_tensors(torch.clone) for _ in range(9)]


@pytest.mark.parametrize(("task", "seed"), [("RepeatPreviousEasy", 1), ("PositionOnlyCartPoleEasy", 2), ("TMaze", 3)])
def test_it_plays_what_the_collector_plays(task: str, seed: int):
    ended = 0
    for mine, theirs in zip(segments(UncapturedCollector, task, seed), segments(Collector, task, seed)):
        for name in PER_STEP:
            if getattr(theirs, name) is not None:
                pairs = zip(leaves(getattr(mine, name)), leaves(getattr(theirs, name)))
                for one, other in pairs:
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(leaves(mine.chunk_states), leaves(theirs.chunk_states)):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert mine.episode_lengths == theirs.episode_lengths
        assert mine.episode_returns == pytest.approx(theirs.episode_returns)
        ended += len(theirs.episode_lengths)
    assert ended > 5
