"""gymnasium's vector wrappers on environments written in torch."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.wrappers import vector as wrappers

from holdfast.envs import NumpyView, make


def view(seed: int) -> NumpyView:
    env = NumpyView(make("holdfast/TMaze-v0", 4, env_kwargs={"length": 3}))
    env.reset(seed=seed)
    env.action_space.seed(seed)
    return env


def random_steps(env, count=60):
    return [env.step(env.action_space.sample()) for _ in range(count)]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_view_gives_the_environments_numbers_as_arrays(seed):
    plain = make("holdfast/TMaze-v0", 4, env_kwargs={"length": 3})
    plain.reset(seed=seed)
    plain.action_space.seed(seed)
    for ours, theirs in zip(random_steps(view(seed)), random_steps(plain)):
        for array, tensor in zip((*ours[:4], ours[4]["final_obs"]), (*theirs[:4], theirs[4]["final_obs"])):
            assert isinstance(array, np.ndarray) and np.array_equal(array, tensor.numpy())


def test_changing_an_array_in_place_does_not_change_the_environment():
    env, undisturbed = view(2), view(2)
    for (obs, *rest), (expected, *others) in zip(random_steps(env), random_steps(undisturbed)):
        assert np.array_equal(obs, expected) and all(np.array_equal(a, b) for a, b in zip(rest[:3], others[:3]))
        obs[:] = 9
        rest[0][:] = 9


@pytest.mark.parametrize("seed", [0, 1])
def test_episode_statistics_are_those_of_the_episodes(seed):
    env = wrappers.RecordEpisodeStatistics(view(seed))
    env.reset(seed=seed)
    total, counted = np.zeros(4), 0
    for _, rewards, terminated, truncated, info in random_steps(env):
        total += rewards
        done = terminated | truncated
        if done.any():
            assert np.allclose(info["episode"]["r"][done], total[done])
            counted += done.sum()
        total[done] = 0
    assert counted > 10


def test_rewards_are_normalized_and_infos_listed():
    normalized = wrappers.NormalizeReward(view(3))
    normalized.reset(seed=3)
    assert all(np.isfinite(rewards).all() for _, rewards, *_ in random_steps(normalized))
    listed = wrappers.DictInfoToList(view(3))
    listed.reset(seed=3)
    for _, _, terminated, truncated, infos in random_steps(listed):
        assert [("final_obs" in info) for info in infos] == list(terminated | truncated)


def test_a_view_is_trained_on_and_saved_like_the_environment_itself():
    env, other = view(1), view(2)
    random_steps(env, 7)
    other.load_state_dict(env.state_dict())
    actions = np.array([0, 1, 2, 2])
    for _ in range(9):
        assert all(np.array_equal(a, b) for a, b in zip(env.step(actions)[:4], other.step(actions)[:4]))


def test_last_observations_that_are_tuples_are_listed():
    listed = wrappers.DictInfoToList(NumpyView(make("holdfast/AutoencodeEasy-v0", 3)))
    plain = make("holdfast/AutoencodeEasy-v0", 3)
    listed.reset(seed=1), plain.reset(seed=1)
    ends = 0
    for _ in range(110):
        actions = listed.action_space.sample()
        *_, infos = listed.step(actions)
        *_, terminated, truncated, info = plain.step(actions)
        for row, ended in enumerate((terminated | truncated).tolist()):
            assert ("final_obs" in infos[row]) == ended
            if ended:
                ends += 1
                assert infos[row]["final_obs"] == tuple(int(part[row]) for part in info["final_obs"])
    assert ends == 3
