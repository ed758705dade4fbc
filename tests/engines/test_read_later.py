"""When numbers of an update and episodes of a captured rollout are read. No GPU needed."""

from __future__ import annotations

import copy

import torch

import holdfast as hf
from holdfast import envs
from holdfast.algorithms.base import Progress
from holdfast.rollout.collector import Collector
from holdfast.rollout.segment import Later, Segment
from ppo_parts import make_ppo


def test_the_metrics_of_an_update_may_be_read_later():
    """They are those of the update, whatever happened to the rollout's tensors and the weights since."""
    config = hf.TrainConfig(num_envs=4, num_steps=8, hidden_size=8, minibatches=2, epochs=2)
    env = envs.make("holdfast/RepeatPreviousEasy-v0", 4)
    torch.manual_seed(3)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8, normalize_value=True)
    collector = Collector(env, policy, 8, seed=3)
    segment = collector.rollout()
    found = []
    for spoil in (False, True):
        again = copy.deepcopy(policy)
        ppo, _ = make_ppo(again, config)
        finish = ppo.start_update(segment, Progress(0, 1, 0, 1, 0.0))
        if spoil:
            with torch.no_grad():
                for tensor in (segment.returns, segment.value, segment.advantage, *again.parameters()):
                    tensor.fill_(float("nan"))
        found.append(finish())
    assert found[0] == found[1]


def test_episodes_are_read_once_and_not_by_an_update():
    asked = []

    def read() -> list[float]:
        asked.append(1)
        return [0.5]

    numbers, flags = torch.randn(4, 2), torch.zeros(4, 2, dtype=torch.bool)
    segment = Segment(
        obs=numbers, actions=flags.long(), resets=flags, rewards=numbers, terminated=flags, truncated=flags, valid=~flags,
        start_state={"h": torch.zeros(2, 1)}, episode_returns=Later(read), advantage=numbers, returns=numbers,
    )  # fmt: skip
    parts = [segment.changed(value=numbers), segment.select(torch.tensor([1])), segment.steps(1, 3), segment.to("cpu")]
    assert asked == [] and all(part.returns is not None for part in parts)
    assert segment.episode_returns == [0.5] == segment.episode_returns and len(asked) == 1
