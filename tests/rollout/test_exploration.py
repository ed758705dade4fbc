"""Correlated exploration noise: its statistics, fresh at resets, and log-probabilities that training replays."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch

import holdfast as hf
from holdfast.rollout.collector import Collector
from holdfast.rollout.exploration import CorrelatedNoise


def pendulum(num_envs: int) -> gym.vector.VectorEnv:  # type: ignore[type-arg]
    return gym.make_vec("Pendulum-v1", num_envs, vectorization_mode="sync")


def a_policy(seed: int) -> hf.ActorCritic:
    torch.manual_seed(seed)
    env = pendulum(1)
    return hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", 16, scale_actions=True)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_is_standard_normal_at_every_step_and_correlated_from_step_to_step(correlation: float):
    torch.manual_seed(0)
    noise = CorrelatedNoise(40_000, 1, correlation, torch.device("cpu"))
    resets = torch.ones(40_000, dtype=torch.bool)
    first = noise.advance(resets)
    for _ in range(3):
        before, now = noise.value, noise.advance(~resets)
    for sample in (first, now):
        assert abs(float(sample.mean())) < 0.03 and abs(float(sample.std()) - 1) < 0.02
    assert float((before * now).mean()) == pytest.approx(correlation, abs=0.03)


def test_a_reset_gives_fresh_noise_to_its_environment_alone():
    torch.manual_seed(0)
    noise = CorrelatedNoise(4, 2, 0.999, torch.device("cpu"))
    before = noise.advance(torch.ones(4, dtype=torch.bool))
    after = noise.advance(torch.tensor([False, True, False, False]))
    near = (after - before).abs().max(1).values < 0.3
    assert near.tolist() == [True, False, True, True]


@pytest.mark.parametrize("seed", range(3))
def test_training_replays_the_log_probabilities_of_a_rollout_with_correlated_noise(seed: int):
    policy = a_policy(seed)
    collector = Collector(pendulum(3), policy, 32, noise_correlation=0.9, seed=seed)
    for _ in range(2):
        segment = collector.rollout()
        ev = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
        assert (ev.log_prob - segment.log_prob).abs().max() < 1e-5


def test_a_checkpoint_of_the_collector_keeps_the_noise(monkeypatch: pytest.MonkeyPatch):
    policy = a_policy(0)
    one, two = (Collector(pendulum(3), policy, 8, noise_correlation=0.9, seed=0) for _ in range(2))
    one.rollout()
    two.start()
    monkeypatch.setattr(two.adapter, "load_state_dict", lambda state: True)  # as if Pendulum could restore its state
    two.load_state_dict(one.state_dict())
    assert one.noise is not None and two.noise is not None
    assert torch.equal(two.noise.value, one.noise.value) and two.noise.value.abs().min() > 0


def test_discrete_actions_have_no_noise():
    env = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", 8)
    assert Collector(env, policy, 4, noise_correlation=0.9).noise is None
