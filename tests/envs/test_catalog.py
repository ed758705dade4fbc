"""The catalog says what the environments are, and what random actions return."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch

import holdfast.envs
from holdfast.envs import make


def test_the_list_says_what_the_environments_are():
    for row in holdfast.envs.list_envs():
        env = make(row.id, 2, seed=0)
        spaces = (env.single_observation_space, env.single_action_space)
        names = [
            f"Discrete({space.n})" if isinstance(space, gym.spaces.Discrete) else f"Box({space.shape[0]})"
            for space in spaces
        ]
        assert names == [row.observation_space, row.action_space]


@pytest.mark.parametrize("row", holdfast.envs.list_envs(), ids=lambda row: row.id)
def test_random_actions_return_what_the_list_says(row):
    env = make(row.id, 300, seed=0)
    env.reset()
    generator = torch.Generator().manual_seed(0)
    total, returns = torch.zeros(300), []
    for _ in range(900):
        actions = torch.randint(int(env.single_action_space.n), (300,), generator=generator)
        _, rewards, _, _, info = env.step(actions)
        total += rewards
        returns.append(total[info["_final_obs"]])
        total = total.masked_fill(info["_final_obs"], 0)
    finished = torch.cat(returns)
    four_sigma = 4 * finished.std().item() / len(finished) ** 0.5
    assert finished.mean().item() == pytest.approx(row.chance_return, abs=four_sigma + 0.0005)  # three digits
