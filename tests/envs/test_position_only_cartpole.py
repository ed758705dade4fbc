"""The motion is gymnasium's CartPole, over whole episodes; starts are as in gymnasium."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch

from holdfast.envs import PositionOnlyCartPole


def motion_of(envs):
    """[B, 4] in our order: positions first."""
    return torch.tensor(np.array([env.state for env in envs]))[:, [0, 2, 1, 3]]


def test_cartpole_moves_as_gymnasiums_over_200_random_steps(monkeypatch):
    theirs = [gym.make("CartPole-v1").unwrapped for _ in range(8)]
    for index, env in enumerate(theirs):
        env.reset(seed=index)
    ours = PositionOnlyCartPole(num_envs=8, max_episode_length=10_000)
    monkeypatch.setattr(ours, "draw", lambda: motion_of(theirs))
    ours.reset()
    actions = np.random.default_rng(0).integers(0, 2, (200, 8))
    for t in range(200):
        terminated = [env.step(int(action))[2] for env, action in zip(theirs, actions[t])]
        for env in (env for env, ended in zip(theirs, terminated) if ended):
            env.reset()
        assert ours.step(actions[t])[2].tolist() == terminated
        torch.testing.assert_close(ours.state["motion"], motion_of(theirs), rtol=0, atol=1e-12)


def test_cartpole_starts_within_5_hundredths():
    env = PositionOnlyCartPole(num_envs=10_000)
    env.reset(seed=0)
    start = env.state["motion"]
    assert start.abs().max() <= 0.05
    assert (start.mean(0).abs() < 0.002).all()
    assert torch.allclose(start.std(0), torch.tensor(0.1 / 12**0.5, dtype=torch.float64), rtol=0.05)


def test_the_final_observation_is_where_the_pole_or_the_cart_went_too_far():
    env = PositionOnlyCartPole(num_envs=32)
    env.reset(seed=0)
    for _ in range(60):
        _, _, terminated, _, info = env.step(torch.randint(2, (32,)))
        limits = torch.tensor([2.4, 0.2094])
        assert torch.equal(terminated, (info["final_obs"].double().abs() > limits).any(-1))
