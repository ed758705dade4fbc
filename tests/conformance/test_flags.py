"""Flags have one meaning: a bool per step and environment. Everything else is an error, and memory stays as it was."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from conformance.episodes import roll, warm_up
from cores.all_cores import KINDS, core_of

BAD_STEP_FLAGS = {
    "int64": (torch.zeros(3, dtype=torch.int64), TypeError, "int64.*bool"),
    "float": (torch.zeros(3), TypeError, "float32.*bool"),
    "too many": (torch.zeros(4, dtype=torch.bool), ValueError, r"\(4,\).*\(3,\)"),
    "one for all": (torch.zeros(1, dtype=torch.bool), ValueError, r"\(1,\).*\(3,\)"),
    "scalar": (torch.tensor(False), ValueError, r"\(\).*\(3,\)"),
    "a column": (torch.zeros(3, 1, dtype=torch.bool), ValueError, r"\(3, 1\).*\(3,\)"),
}


@pytest.mark.parametrize("case", BAD_STEP_FLAGS)
def test_wrong_flags_in_a_step_are_refused_and_memory_is_unchanged(case):
    from conformance.policies import actor_critic

    bad, error, words = BAD_STEP_FLAGS[case]
    driver, untouched = actor_critic("lstm", "zero"), actor_critic("lstm", "zero")
    for each in (driver, untouched):
        warm_up(each, 2)  # a third environment would be new
    obs = driver.observations(3, seed=1)
    with pytest.raises(error, match=words):
        driver.policy.act(obs, bad)
    assert driver.memory.num_envs == 2
    assert torch.equal(driver.act(obs).signature, untouched.act(obs).signature)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3,), (4,), (3, 4), (4, 3, 1), (1, 3), (12,)], ids=str)
def test_flags_of_another_shape_never_broadcast_over_a_sequence(kind, shape):
    core = core_of(kind, "zero")
    with pytest.raises(ValueError, match="resets has shape"):
        core(torch.zeros(4, 3, 6), None, torch.zeros(shape, dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32], ids=str)
def test_flags_of_another_dtype_are_refused(kind, dtype):
    with pytest.raises(TypeError, match=r"expected torch\.bool"):
        core_of(kind, "zero")(torch.zeros(4, 3, 6), None, torch.zeros(4, 3, dtype=dtype))


def test_flags_that_are_no_tensor_are_refused_by_a_core_and_taken_by_a_policy():
    with pytest.raises(TypeError, match=r"list.*bool tensor"):
        hf.LSTM(6, 4)(torch.zeros(2, 6), None, [True, False])
    from conformance.policies import actor_critic

    driver = actor_critic("gru", "zero")
    warm_up(driver, 2)
    first = actor_critic("gru", "zero").act(driver.observations(2, seed=1)).value
    assert torch.equal(driver.policy.act(driver.observations(2, seed=1), [True, True], deterministic=True).value, first)


def test_flags_matter_at_all():
    from conformance.policies import actor_critic

    obs = actor_critic("lstm", "zero").observations(4, 2)
    every = torch.ones(4, 2, dtype=torch.bool)
    assert not torch.equal(
        roll(actor_critic("lstm", "zero"), obs, every).value, roll(actor_critic("lstm", "zero"), obs).value
    )
