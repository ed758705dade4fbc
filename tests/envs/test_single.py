"""`gymnasium.make("holdfast/...")`: one environment, as gymnasium wants it, with the vector environment's numbers."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import holdfast.envs
from holdfast.envs import TMaze
from holdfast.envs.single import SingleEnv
from holdfast.state import leaves, tree_map

IDS = [row.id for row in holdfast.envs.list_envs()]


def equal(obs, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(leaves(obs), leaves(other), strict=True))


def first_row(tree):
    return tree_map(lambda rows: rows[0], tree)


@pytest.mark.filterwarnings("ignore:.*WARN")
@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_checker_passes_and_the_spec_makes_it_again(env_id):
    env = gym.make(env_id)
    check_env(env.unwrapped, skip_render_check=True)
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.spec == env.spec
    obs, _ = env.reset(seed=3)
    assert equal(obs, again.reset(seed=3)[0]) and env.unwrapped.np_random_seed == 3


@pytest.mark.parametrize("seed", [0, 11])
@pytest.mark.parametrize("env_id", IDS)
def test_one_environment_plays_as_a_vector_environment_of_one(env_id, seed):
    one, vector = gym.make(env_id), holdfast.envs.make(env_id, 1)
    one.action_space.seed(seed)
    obs, (rows, _) = one.reset(seed=seed)[0], vector.reset(seed=seed)
    done = False
    for _ in range(40):
        assert equal(obs, first_row(rows)) and obs in one.observation_space
        action = one.action_space.sample()
        obs, reward, terminated, truncated, _ = one.step(action)
        _, rewards, ended, cut, info = vector.step(np.array([action]))
        rows, done = info["final_obs"], terminated or truncated
        assert (reward, terminated, truncated) == (rewards[0].item(), ended[0].item(), cut[0].item())
        if done:
            assert equal(obs, first_row(rows))
            break
    if done:
        with pytest.raises(ResetNeeded, match="after an episode's end"):
            one.step(action)


def test_arguments_reach_the_task_and_rendering_is_refused():
    assert gym.make("holdfast/TMaze-v0", length=3).unwrapped.vector_env.settings == {"length": 3}
    with pytest.raises(ValueError, match="TMaze can render nothing, not 'rgb_array'; leave it out"):
        SingleEnv(TMaze, render_mode="rgb_array")


def test_a_task_that_draws_is_drawn():
    class Drawn(TMaze):
        render_modes = ("ansi",)

        def __init__(self, num_envs, render_mode=None):
            super().__init__(num_envs)

        def render(self):
            return tuple(f"maze {row}" for row in range(self.num_envs))

    env = SingleEnv(Drawn, render_mode="ansi")
    env.reset(seed=0)
    assert env.render() == "maze 0" and env.metadata["render_modes"] == ["ansi"]


@pytest.mark.parametrize("seed", [0, 5, np.int64(7)])
def test_the_seed_of_a_reset_is_the_seed_that_the_environment_reports(seed):
    env = holdfast.envs.make("holdfast/TMaze-v0", 3)
    env.reset(seed=seed)
    env.reset()
    assert env.np_random_seed == seed
