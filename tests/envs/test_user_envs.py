"""Environments of one's own in `make`: from a module, a class, a function, one environment; and the errors about them."""

from __future__ import annotations

import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from counting_env import CountingEnv, vector_env
from holdfast.envs import UnknownEnvError, make
from holdfast.envs.user_envs import recorded_name

MODULE = """
import gymnasium as gym
from counting_env import CountingEnv, vector_env
from gymnasium.vector import AutoresetMode

class Counter(CountingEnv):
    def __init__(self, unit: float = 1.0, size: int = 3):
        super().__init__(unit=unit)

class Nested:
    Inner = Counter

def ten():
    return Counter(10.0)

def several(num_envs, unit=1.0):
    return vector_env(AutoresetMode.SAME_STEP, *[{"unit": unit * (i + 1)} for i in range(num_envs)])

def nothing():
    return None

def broken():
    raise KeyError("no level file")

gym.register("Counter-v0", entry_point=f"{__name__}:Counter", kwargs={"unit": 5.0})
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """A module in the current folder, under a name that no other test uses."""
    name = f"own_envs_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield name
    sys.modules.pop(name, None)
    gym.registry.pop("Counter-v0", None)


@pytest.mark.parametrize("vectorization", ["sync", "async", "workers"])
@pytest.mark.parametrize(("what", "unit"), [("Counter-v0", 5), ("Counter", 1), ("Nested.Inner", 1), ("ten", 10)])
def test_a_module_in_the_current_folder_gives_environments(module, what, unit, vectorization):
    env = make(f"{module}:{what}", 2, vectorization=vectorization)
    try:
        assert env.reset(seed=0)[0].tolist() == [[unit], [unit]]
        assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    finally:
        env.close()


def test_a_function_with_num_envs_makes_the_vector_environment_itself(module):
    env = make(f"{module}:several", 3, env_kwargs={"unit": 2.0})
    assert env.reset()[0].tolist() == [[2], [4], [6]]


def test_arguments_reach_a_class(module):
    assert make(f"{module}:Counter", 1, env_kwargs={"unit": 7.0}).reset()[0].item() == 7


@pytest.mark.parametrize("vectorization", ["sync", "async", "workers"])
def test_a_class_and_a_function_are_taken_as_they_are(vectorization):
    for source, first in ((CountingEnv, 1), (lambda: CountingEnv(unit=3.0), 3)):
        env = make(source, 2, vectorization=vectorization)
        assert env.reset(seed=1)[0].tolist() == [[first], [first]]
        env.close()


def test_one_environment_is_row_0_and_the_other_rows_are_copies_that_do_not_disturb_it():
    one = CountingEnv(lengths=(9,))
    one.unit = 4.0  # set after its construction
    env = make(one, 3)
    assert env.envs[0].unwrapped is one and len({id(copy.unwrapped) for copy in env.envs}) == 3
    assert env.reset()[0].tolist() == [[4], [4], [4]]
    env.envs[2].unwrapped.step(0)
    assert [copy.unwrapped.t for copy in env.envs] == [0, 0, 1]


def test_the_rows_of_one_environment_have_their_own_random_numbers():
    obs, _ = make(gym.make("CartPole-v1"), 3).reset(seed=2)
    assert np.array_equal(obs, make("CartPole-v1", 3).reset(seed=2)[0]) and len(np.unique(obs[:, 0])) == 3


def test_a_vector_environment_stays_as_it_is():
    env = vector_env(AutoresetMode.NEXT_STEP, {}, {})
    assert make(env, 2) is env


# --- errors -----------------------------------------------------------------------------------------------------------


def one_line(env, **options) -> str:
    with pytest.raises((ValueError, TypeError)) as error:
        make(env, 2, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("wrong", ["Count", "Countr-v0", "Counter-v3"])
def test_a_name_that_a_module_lacks_is_answered_with_one_that_works(module, wrong):
    with pytest.raises(UnknownEnvError) as error:
        make(f"{module}:{wrong}", 2)
    suggested = str(error.value).partition("did you mean ")[2].rstrip("?").split(" or ")[0]
    assert suggested.startswith(f"{module}:Counter") and make(suggested, 2).num_envs == 2


def test_what_is_no_environment_is_refused_with_what_is_expected(module):
    assert "int is neither a gymnasium nor a vector environment (it has no num_envs); expected an id" in one_line(3)
    assert "expected a gymnasium.Env" in one_line(f"{module}:nothing")
    assert "expected a gymnasium.Env" in one_line(dict)
    assert f"{module}:broken: KeyError: 'no level file'" in one_line(f"{module}:broken")


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "own_envs_broken.py").write_text("import numpy\nnumpy.no_such_function()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert "importing own_envs_broken raised AttributeError" in one_line("own_envs_broken:Env")
    assert "; a class in a module is named own_envs_broken:Env" in one_line("own_envs_broken.Env")


def test_an_environment_that_lacks_a_package_says_which_environment_it_is():
    def needs_a_simulator():
        import no_such_simulator  # noqa: F401

    with pytest.raises(ImportError, match=r"^needs_a_simulator: No module named 'no_such_simulator'$"):
        make(needs_a_simulator, 2)


@pytest.mark.parametrize(
    ("env", "kwargs", "said"),
    [
        ("holdfast/TMaze-v0", {"length": "abc"}, "with length='abc': length is 'abc', expected a value of type int"),
        ("holdfast/TMaze-v0", {"length": 5.5}, "length is 5.5, expected a value of type int"),
        ("holdfast/TMaze-v0", {"length": True}, "length is True, expected a value of type int"),
        ("holdfast/TMaze-v0", {"lenght": 5}, "there is no argument 'lenght'; it takes length"),
        ("holdfast/TMaze-v0", {"length": 1}, "length is 1; expected at least 2"),
        ("CartPole-v1", {"lenght": 5}, "CartPole-v1 with lenght=5: TypeError"),
        (CountingEnv, {"units": 5}, "CountingEnv with units=5: there is no argument 'units'; it takes unit, reward"),
        (CountingEnv, {"unit": "five"}, "unit is 'five', expected a value of type float"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_expected(env, kwargs, said):
    assert said in one_line(env, env_kwargs=kwargs)


def test_an_environment_that_cannot_be_copied_asks_for_a_function():
    class Connected(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    assert "Connected cannot be copied for num_envs=2" in one_line(Connected())
    assert "env=lambda: MyEnv(...), or set num_envs=1" in one_line(Connected())
    assert make(Connected(), 1).reset()[0].tolist() == [[1]]


def test_arguments_for_an_environment_that_is_already_made_are_refused():
    assert "env_kwargs cannot change a CountingEnv" in one_line(CountingEnv(), env_kwargs={"unit": 2.0})


# --- what a run records -----------------------------------------------------------------------------------------------


def test_what_can_be_found_by_name_is_recorded_by_name_and_the_rest_as_an_object():
    assert recorded_name("CartPole-v1") == "CartPole-v1"
    assert recorded_name(CountingEnv) == "counting_env:CountingEnv"
    assert recorded_name(lambda: CountingEnv()) == "own-env:lambda"
    assert recorded_name(CountingEnv()) == "own-env:CountingEnv"
    assert recorded_name(gym.make("CartPole-v1")) == "own-env:CartPole-v1"
    assert recorded_name(SyncVectorEnv([CountingEnv])) == "own-env:SyncVectorEnv"
    assert "pass it again with env=, or name it with --env module:Name" in one_line("own-env:CountingEnv")


class DrawsGlobally(CountingEnv):
    def draw(self):
        return float(np.random.random()), float(torch.rand(()))


@pytest.mark.parametrize("vectorization", ["async", "workers"])
def test_processes_of_environments_do_not_draw_the_same_random_numbers(vectorization):
    def drawn(seed):
        np.random.seed(seed)
        env = make(DrawsGlobally, 4, vectorization=vectorization)
        numbers = env.call("draw")
        env.close()
        return numbers

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert len({number for pair in first for number in pair}) == 8, "no two are equal"
    assert first == again != other, "and the program's seed decides which"


class WithoutSpaces(gym.Env):
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}


class SpaceIsNone(WithoutSpaces):
    observation_space = gym.spaces.Discrete(2)
    action_space = None


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            WithoutSpaces,
            r"WithoutSpaces has no observation_space; set it .* self\.observation_space = gymnasium\.spaces",
        ),
        (SpaceIsNone, "SpaceIsNone has no action_space"),
    ],
)
def test_an_environment_without_a_space_is_told_to_set_it(env, said):
    with pytest.raises(ValueError, match=said):
        make(env, 2)


@pytest.mark.parametrize("num_envs", [0, -1, "8", 2.0, None, True])
@pytest.mark.parametrize("env", ["CartPole-v1", CountingEnv])
def test_a_number_of_environments_is_an_integer_of_at_least_1(env, num_envs):
    with pytest.raises(ValueError, match=f"num_envs must be an integer of at least 1, got {num_envs!r}"):
        make(env, num_envs)


def test_a_class_without_a_constructor_takes_no_arguments_and_says_which_came():
    class Plain(gym.Env):
        observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

    assert make(Plain, 2).num_envs == 2
    with pytest.raises(ValueError, match=r"^Plain with steps=3: there is no argument 'steps'; it takes none$"):
        make(Plain, 2, env_kwargs={"steps": 3})
