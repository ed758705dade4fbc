"""An update that is queued as a whole against `PPO.update`, and when episodes of a captured rollout are read. No GPU needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast import envs
from holdfast.algorithms.ppo import PPO
from holdfast.engines.choose import UpdateEngines
from holdfast.engines.graph_rollout import GraphSegment
from holdfast.engines.minibatch import make_adam
from holdfast.engines.queued_update import QueuedPPO, start_update, without_episodes
from holdfast.rollout.collector import Collector
from holdfast.rollout.segment import Segment

SETTINGS: list[dict[str, Any]] = [
    {"epochs": 2, "minibatches": 3, "lr_schedule": "linear"},
    {"epochs": 1, "minibatches": 1, "normalize_advantage": False, "clip_schedule": "linear"},
    {"epochs": 2, "minibatches": 2, "bptt": 5, "clip_value": 0.1},
    {"epochs": 3, "minibatches": 2, "target_kl": 1e-9},
    {"epochs": 2, "minibatches": 2, "bptt": 5, "refresh_states": True},
]


def updates(kind: type[PPO], settings: dict[str, Any], seed: int) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """The metrics of three updates, and the weights after them."""
    config = hf.TrainConfig(num_envs=6, num_steps=10, hidden_size=8, seed=seed, **settings)
    env = envs.make("holdfast/RepeatPreviousEasy-v0", 6)
    torch.manual_seed(seed)
    policy = hf.ActorCritic(
        env.single_observation_space, env.single_action_space, hidden_size=8, normalize_value=seed % 2 == 1
    )
    optimizer = make_adam(policy, config)
    ppo = kind(policy, config, optimizer, UpdateEngines(policy, config, optimizer))
    collector = Collector(env, policy, 10, bptt=config.bptt, gamma=0.9, seed=seed)
    rows = [start_update(ppo, collector.rollout(), i / 5, all_valid=i > 0)() for i in range(3)]
    return rows, [p.detach() for p in policy.parameters()]


@pytest.mark.parametrize(("seed", "settings"), enumerate(SETTINGS, start=1))
def test_a_queued_update_is_ppos(seed: int, settings: dict[str, Any]):
    (queued, mine), (page, theirs) = updates(QueuedPPO, settings, seed), updates(PPO, settings, seed)
    assert all(map(torch.equal, mine, theirs))
    for one, other in zip(queued, page):
        assert list(one) == list(other)
        assert one == pytest.approx(other, rel=1e-6, nan_ok=True)


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
        optimizer = make_adam(again, config)
        ppo = QueuedPPO(again, config, optimizer, UpdateEngines(again, config, optimizer))
        finish = ppo.start(segment, 0.0, all_valid=True)
        if spoil:
            with torch.no_grad():
                for tensor in (segment.returns, segment.value, segment.advantage, *again.parameters()):
                    tensor.fill_(float("nan"))
        found.append(finish())
    assert found[0] == found[1]


def test_episodes_are_read_once_and_not_by_an_update():
    asked = []

    def read() -> tuple[list[float], list[int], float]:
        asked.append(1)
        return [0.5], [7], 0.25

    numbers, flags = torch.randn(4, 2), torch.zeros(4, 2, dtype=torch.bool)
    segment = GraphSegment(
        obs=numbers, actions=flags.long(), resets=flags, rewards=numbers, log_prob=numbers, value=numbers,
        terminated=flags, truncated=flags, advantage=numbers, returns=numbers, valid=~flags, start_state=(),
        seconds={"env": 0.0, "policy": 0.0},
    )  # fmt: skip
    segment.read, segment.launched = read, 100.0
    plain = without_episodes(segment)
    assert type(plain) is Segment and plain.returns is numbers and plain.episode_returns == [] and asked == []
    assert segment.episode_lengths == [7] and segment.episode_returns == [0.5] and len(asked) == 1
    assert segment.over_at == 100.25 and segment.seconds["policy"] == 0.25
