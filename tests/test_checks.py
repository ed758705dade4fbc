"""`hf.debug(True)` says which environment went bad and when; what goes to a GPU is looked at before."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from conformance.policies import actor_critic
from cores.all_cores import KINDS, core_of
from holdfast import checks


@pytest.fixture
def debugging():
    hf.debug(True)
    yield
    hf.debug(False)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_sequence_is_traced_to_its_first_step_and_environment(debugging, kind):
    x = torch.zeros(5, 4, 6)
    x[2, 3, 0] = float("nan")
    x[3, 1, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"step t=2, environment 3.*input is already non-finite there"):
        core_of(kind, "zero")(x)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_the_state_is_not_blamed_on_the_input(debugging, kind):
    core = core_of(kind, "zero")
    state = core.initial_state(4)
    for leaf in hf.state.leaves(state):
        leaf[1] = float("nan") if leaf.is_floating_point() else 3  # of the window: steps that it has seen
    with pytest.raises(FloatingPointError, match=r"step t=0, environment 1.*look at state and weights"):
        core(torch.zeros(5, 4, 6), state)


def test_nan_in_a_step_is_traced_to_the_environments_id(debugging):
    driver = actor_critic("lstm", "zero")
    obs = driver.observations(3)
    obs[1, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="environment 8 "):
        driver.policy.act(obs, env_ids=[5, 8, 2])
    with pytest.raises(FloatingPointError, match="environment 1 "):
        driver.policy.act(obs)
    with pytest.raises(FloatingPointError, match="environment 2 "):
        driver.policy.peek_value(obs[[0, 2, 1]], env_ids=[8, 5, 2])
    assert driver.memory.num_envs == 0


def test_a_reset_clears_the_nan_and_nothing_is_reported(debugging):
    core = core_of("lstm", "zero")
    state = core.initial_state(2)
    state["h"][1] = float("nan")
    core(torch.zeros(3, 2, 6), state, torch.tensor([[False, True], [False, False], [False, False]]))


def test_without_debugging_nan_passes():
    assert core_of("gru", "zero")(torch.full((2, 2, 6), float("nan")))[0].isnan().all()


class OnAGpu(torch.Tensor):
    device = torch.device("cuda")  # type: ignore[assignment]


def test_values_may_be_looked_at_on_the_host_and_elsewhere_only_when_debugging():
    here, there, nowhere = torch.zeros(1), torch.zeros(1).as_subclass(OnAGpu), torch.zeros(1, device="meta")
    assert checks.values_are_readable(here) and not checks.values_are_readable(there)
    hf.debug()
    assert checks.values_are_readable(there) and checks.is_debug()
    assert not checks.values_are_readable(nowhere)
    hf.debug(False)
    assert not checks.is_debug()


def test_flags_on_another_device_are_refused():
    with pytest.raises(ValueError, match=r"resets is on meta, the input on cpu"):
        hf.LSTM(3, 4)(torch.zeros(2, 3), None, torch.zeros(2, dtype=torch.bool, device="meta"))


NESTED = spaces.Dict(
    {"card": spaces.MultiDiscrete([4, 2], start=[1, 0]), "pair": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1)])}
)


@pytest.mark.parametrize(
    ("card", "digit", "words"),
    [
        ([[1, 0], [4, 1]], [0, 2], None),
        ([[1, 0], [5, 1]], [0, 2], "got 0 to 5, observation_space allows 1 to 4, 0 to 1"),
        ([[0, 0], [4, 1]], [0, 2], "got 0 to 4"),
        ([[1, 0], [4, 1]], [0, 3], "got 0 to 3, observation_space allows 0 to 2"),
        ([[1, 0], [4, 1]], [-1, 2], "got -1 to 2"),
        ([[1, 0], [4, 1]], [0.5, 2.0], "hold 0.5, expected whole numbers"),
    ],
)
@pytest.mark.parametrize("as_array", [np.array, torch.tensor])
def test_discrete_observations_on_the_host_are_compared_with_their_space(card, digit, words, as_array):
    obs = {"card": as_array(card), "pair": (as_array(digit), np.zeros((2, 1)))}
    rows = np.array([None, *[{"card": c, "pair": (d, None)} for c, d in zip(as_array(card), as_array(digit))]], object)
    for given in (obs, rows):
        with nullcontext() if words is None else pytest.raises(ValueError, match=words if given is obs else None):
            checks.check_discrete(given, NESTED)
    checks.check_discrete({"card": torch.zeros(2, 2, device="meta")}, NESTED)  # not on the host: left alone


@pytest.mark.parametrize("use", ["act", "runner"])
def test_a_policy_elsewhere_refuses_arrays_that_are_not_in_its_space(use):
    policy = hf.ActorCritic(spaces.Discrete(3), spaces.Discrete(2), "lstm", 8).to("meta")
    act = policy.act if use == "act" else hf.Runner(policy).act
    with pytest.raises(ValueError, match="got 0 to 3, observation_space allows 0 to 2"):
        act(np.array([0, 3]))
