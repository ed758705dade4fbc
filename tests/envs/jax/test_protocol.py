"""What counts as an environment written in JAX, its spaces, and what is said where JAX or a package is missing. Needs no JAX."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

import holdfast.envs
from counting_env import CountingEnv
from holdfast.cli import main as holdfast_command
from holdfast.config.imports import module_named
from holdfast.envs.jax.protocol import flat_space, gym_space, is_jax_env


class Four:
    def reset(self, key): ...
    def step(self, key, state, action): ...


class LikeGymnax:
    def reset(self, rng, params=None): ...
    def step(self, rng, state, action, params=None): ...


class NeedsASeed:
    def reset(self, seed): ...
    def step(self, action): ...


class ParallelGame:
    def reset(self, seed=None, options=None): ...
    def step(self, actions): ...


class OtherWords:
    def reset(self, random): ...
    def step(self, random, world, move): ...


@pytest.mark.parametrize("kind", [Four, LikeGymnax, OtherWords])
def test_an_environment_whose_reset_takes_a_key_is_one_in_jax_as_a_class_and_as_an_object(kind):
    assert is_jax_env(kind) and is_jax_env(kind())


@pytest.mark.parametrize(
    "thing", [CountingEnv, CountingEnv(), ParallelGame, NeedsASeed, gym.vector.VectorEnv, 3, None, dict]
)
def test_other_environments_and_objects_are_not(thing):
    assert not is_jax_env(thing)


def test_spaces_in_the_form_of_gymnax_become_those_of_gymnasium():
    box = SimpleNamespace(low=0, high=np.array([1.0, 2.0]), shape=(2,), dtype=np.float32)
    discrete = SimpleNamespace(n=5, shape=(), dtype=np.int32)
    both = SimpleNamespace(spaces={"b": box, "d": discrete})
    assert gym_space(both)["b"] == gym.spaces.Box(np.zeros(2, np.float32), np.array([1, 2], np.float32))
    assert gym_space(both)["d"] == gym.spaces.Discrete(5)
    with pytest.raises(TypeError, match="is not a space"):
        gym_space("Box")


def test_nested_spaces_become_one_dict_with_names_by_path():
    inner = gym.spaces.Dict({"x": gym.spaces.Discrete(2), "y": gym.spaces.Discrete(3)})
    flat = flat_space(gym.spaces.Dict({"a": inner, "t": gym.spaces.Tuple([gym.spaces.Discrete(4)])}))
    assert {name: part.n for name, part in flat.items()} == {"a.x": 2, "a.y": 3, "t.0": 4}
    assert flat_space(gym.spaces.Discrete(2)) == gym.spaces.Discrete(2)


SUITES = ["gymnax:CartPole-v1", "craftax:Craftax-Symbolic-v1", "popgym-arcade:CartPoleEasy", "brax:ant"]


@pytest.mark.parametrize("env_id", SUITES)
def test_without_jax_the_extra_to_install_is_named_in_one_line(env_id, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax", None)
    assert holdfast_command(["train", "--env", env_id]) == 2
    said = capsys.readouterr().err.strip()
    assert f"pip install 'holdfast[{env_id.partition(':')[0]}]'" in said and "\n" not in said


@pytest.mark.parametrize(
    ("env_id", "package"),
    list(zip(SUITES, ["gymnax", "craftax.craftax_env", "popgym_arcade.registration", "brax.envs"])),
)
def test_without_the_package_its_extra_is_named(env_id, package, monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'holdfast\[" + env_id.partition(":")[0]):
        holdfast.envs.make(env_id, 2)


@pytest.mark.parametrize("typed", ["gymnx", "Craftax", "env-pool", "petting_zoo"])
def test_a_prefix_with_a_typing_error_is_answered_with_the_right_one(typed):
    meant = {"gymnx": "gymnax", "Craftax": "craftax", "env-pool": "envpool", "petting_zoo": "pettingzoo"}[typed]
    with pytest.raises(ValueError, match=f"no module .*; did you mean {meant}:Some-v1"):
        holdfast.envs.make(f"{typed}:Some-v1", 2)


def test_these_prefixes_name_no_module_of_the_users_and_are_listed(capsys):
    assert [module_named(env_id, "env") for env_id in SUITES] == [None] * 4
    holdfast_command(["envs"])
    said = capsys.readouterr().out
    assert all(f"{env_id.partition(':')[0]}:" in said for env_id in [*SUITES, "envpool:", "pettingzoo:", "popgym:"])
