"""The catalog says what the environments are, and what random actions return."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch

import holdfast.envs
from holdfast.envs import make
from random_actions import random_actions


def name_of(space):
    if isinstance(space, gym.spaces.Discrete):
        return f"Discrete({space.n})"
    if isinstance(space, gym.spaces.MultiDiscrete):
        sizes = space.nvec.tolist()
        several = f"{len(sizes)} x {sizes[0]}" if len(sizes) > 3 else ", ".join(map(str, sizes))
        return f"MultiDiscrete({several})"
    if isinstance(space, gym.spaces.Tuple):
        return f"Tuple({', '.join(map(name_of, space))})"
    return f"Box({space.shape[0]})"


def test_the_list_says_what_the_environments_are():
    for row in holdfast.envs.list_envs():
        env = make(row.id, 2, seed=0)
        spaces = (env.single_observation_space, env.single_action_space)
        assert [name_of(space) for space in spaces] == [row.observation_space, row.action_space]


@pytest.mark.parametrize("row", holdfast.envs.list_envs(), ids=lambda row: row.id)
def test_random_actions_return_what_the_list_says(row):
    env = make(row.id, 300, seed=0)
    env.reset()
    # Episodes in a labyrinth are long, and the short ones are better: only the first one of each environment counts.
    first_only = "Labyrinth" in row.id
    total, counts, returns = torch.zeros(300), torch.ones(300, dtype=torch.bool), []
    for actions in random_actions(env, 1023 if first_only else 900):
        _, rewards, _, _, info = env.step(actions)
        total += rewards
        ended = info["_final_obs"]
        returns.append(total[ended & counts])
        total = total.masked_fill(ended, 0)
        counts = counts & ~ended if first_only else counts
    finished = torch.cat(returns)
    assert len(finished) >= 300
    four_sigma = 4 * finished.std().item() / len(finished) ** 0.5
    assert finished.mean().item() == pytest.approx(row.chance_return, abs=four_sigma + 0.0005)  # three digits
