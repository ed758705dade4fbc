"""Environments of gymnax, Craftax, POPGym Arcade and Brax by name: numbers as in their packages, and why an episode ended."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

import holdfast.envs

jax = pytest.importorskip("jax")


def test_gymnax_plays_as_it_does_by_itself():
    gymnax = pytest.importorskip("gymnax")
    from holdfast.envs.jax.suites import GymnaxEnv

    env, params = gymnax.make("Acrobot-v1")
    ours, key = GymnaxEnv(env, params), jax.random.key(3)
    obs, state = ours.reset(key)
    expected, other = env.reset_env(key, params)
    for step in range(20):
        assert np.array_equal(obs, expected)
        action, key = step % 3, jax.random.split(key)[0]
        obs, state, reward, terminated, truncated = ours.step(key, state, action)
        expected, other, gained, done, _ = env.step_env(key, other, action, params)
        assert reward == gained and bool(terminated | truncated) == bool(done)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "DiscountingChain-bsuite"])
def test_the_time_limit_of_gymnax_truncates_and_a_fall_terminates(name):
    pytest.importorskip("gymnax")
    env = holdfast.envs.make(f"gymnax:{name}", 32, seed=1, env_kwargs={"max_steps_in_episode": 12})
    env.action_space.seed(1)
    steps, lengths = np.zeros(32, int), {"terminated": [], "truncated": []}
    for _ in range(40):
        _, _, ended, cut, _ = env.step(env.action_space.sample())
        steps += 1
        lengths["terminated"] += steps[ended.numpy()].tolist()
        lengths["truncated"] += steps[cut.numpy()].tolist()
        steps[(ended | cut).numpy()] = 0
    assert set(lengths["truncated"]) == {12}
    assert bool(lengths["terminated"]) == (name == "CartPole-v1") and not any(n > 12 for n in lengths["terminated"])


def test_names_are_found_in_any_case_and_mistakes_answered():
    pytest.importorskip("gymnax")
    assert holdfast.envs.make("gymnax:cartpole", 2).settings == {"env": "gymnax:CartPole-v1"}
    with pytest.raises(ValueError, match=r"gymnax has no environment 'CartPol-v2'; did you mean gymnax:CartPole-v1"):
        holdfast.envs.make("gymnax:CartPol-v2", 2)
    with pytest.raises(ValueError, match=r"CartPole-v1 has no parameter 'gravitation'; it has .*gravity, masscart"):
        holdfast.envs.make("gymnax:CartPole-v1", 2, env_kwargs={"gravitation": 3})
    with pytest.raises(ValueError, match=r"gravity is 'low'; CartPole-v1 expects a number, such as 9\.8"):
        holdfast.envs.make("gymnax:CartPole-v1", 2, env_kwargs={"gravity": "low"})
    with pytest.raises(ValueError, match="Catch-bsuite has no parameter 'row'; it has rows, columns, max_steps_in_ep"):
        holdfast.envs.make("gymnax:Catch-bsuite", 2, env_kwargs={"row": 3})
    env = holdfast.envs.make("gymnax:CartPole-v1", 2, seed=1, env_kwargs={"gravity": 0.0})
    assert env.settings["gravity"] == 0.0


def test_arguments_of_the_constructor_reach_gymnax_and_whole_numbers_stay_what_they_are():
    pytest.importorskip("gymnax")
    env = holdfast.envs.make("gymnax:Catch-bsuite", 8, env_kwargs={"rows": 4, "columns": 3})
    obs, _ = env.reset(seed=1)
    assert obs.shape == (8, 4, 3) and obs.sum((1, 2)).tolist() == [2] * 8  # the ball and the paddle


@dataclasses.dataclass(frozen=True)
class Params:
    max_steps_in_episode: int = 100

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


class CountsIn:
    """In the form of gymnax: the observation counts steps in units of `unit`, as a float; its space says integers."""

    def __init__(self, unit: float = 1.0) -> None:
        self.unit, self.default_params = unit, Params()

    def reset_env(self, key, params):
        return jax.numpy.zeros(2), {"t": jax.numpy.zeros((), int)}

    def step_env(self, key, state, action, params):
        t = state["t"] + 1
        return jax.numpy.full(2, t * self.unit), {"t": t}, 1.0, t >= params.max_steps_in_episode, {}

    def is_terminal(self, state, params):
        return state["t"] >= params.max_steps_in_episode

    def observation_space(self, params):
        return gym.spaces.Box(0, 100, (2,), np.int32)

    def action_space(self, params):
        return gym.spaces.Discrete(2)


def test_fractions_in_a_gymnax_environment_whose_space_is_of_integers_are_refused():
    said = r"CountsIn returned an observation with fractions, but its observation space is Box\(0, 100, \(2,\), int32\), which"
    with pytest.raises(ValueError, match=said):
        holdfast.envs.from_jax(CountsIn(unit=0.5), 2)
    env = holdfast.envs.from_jax(CountsIn(), 2)
    env.reset(seed=0)
    assert env.step(torch.zeros(2, dtype=torch.long))[0].tolist() == [[1, 1], [1, 1]]


def test_craftax_has_its_spaces_and_a_state_that_can_be_saved():
    pytest.importorskip("craftax")
    env = holdfast.envs.make("craftax:craftax-classic-symbolic", 4)  # traced, and not compiled: that takes a minute
    assert env.single_observation_space.shape == (1345,) and env.single_action_space.n == 17
    assert {leaf.shape[0] for leaf in env.example_state().values()} == {4}
    with pytest.raises(ValueError, match="did you mean craftax:Craftax-Classic-Symbolic-v1"):
        holdfast.envs.make("craftax:Craftax-Clasic-Symbolic", 2)


def test_brax_is_truncated_after_its_episode_length():
    pytest.importorskip("brax")
    env = holdfast.envs.make("brax:fast", 3, seed=0, env_kwargs={"episode_length": 4})
    actions = torch.zeros(3, env.single_action_space.shape[0])
    cuts = [env.step(actions)[3].tolist() for _ in range(8)]
    assert cuts == [[step in (3, 7)] * 3 for step in range(8)]


def test_popgym_arcade_gives_images():
    pytest.importorskip("popgym_arcade")
    for name in ("CountRecallEasy", "CartPoleHard", "BattleShipEasy", "NavigatorEasy", "TetrisEasy", "BreakoutEasy"):
        env = holdfast.envs.make(f"popgym-arcade:{name}", 2, env_kwargs={"obs_size": 128, "partial_obs": True})
        assert env.single_observation_space.dtype == np.uint8 and env.single_observation_space.shape == (128, 128, 3)
