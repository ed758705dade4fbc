"""Both legs use the same precision, gradients survive autocast, and states follow the module's dtype."""

from __future__ import annotations

import pytest
import torch

from conformance.episodes import flags, for_resets, roll, warm_up
from cores.all_cores import leaf_dtypes
from holdfast import state as state_ops

HALVES = [torch.bfloat16, torch.float16]


def log_prob_gap(driver):
    """|log-probability of the rollout - of its replay|, [T, B]."""
    T, B = 12, 4
    warm_up(driver, B)
    ends = flags(T, B, (3, 0), (7, 1), (0, 2), (11, 3))
    rollout = roll(driver, driver.observations(T, B, seed=1), ends, None)
    with torch.no_grad():
        return (rollout.replay(driver).log_prob.float() - rollout.log_prob.float()).abs()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_half_precision_module_replays_within_the_laws_tolerance(make, dtype):
    driver = make()
    driver.module.to(dtype)
    gap = log_prob_gap(driver)
    assert gap.max() <= 1e-2 and gap.mean() <= 1e-3


def test_autocast_in_both_legs_replays_within_the_laws_tolerance(make):
    driver = make()
    with torch.autocast("cpu", torch.bfloat16):
        gap = log_prob_gap(driver)
    assert gap.max() <= 1e-2 and gap.mean() <= 1e-3


def test_a_float64_module_replays_to_its_own_precision(make):
    driver = make()
    driver.module.double()
    assert log_prob_gap(driver).max() <= 1e-6  # distributions are float32


def test_a_pass_without_gradients_under_autocast_does_not_sever_those_of_the_next(make):
    driver = make()
    warm_up(driver, 2)
    obs = driver.observations(5, 2)
    actions = torch.zeros(5, 2, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            driver.evaluate(obs, actions, driver.start_state(2))
            driver.act(obs[0])
        ev = driver.evaluate(obs, actions, driver.start_state(2), flags(5, 2, (2, 0), (3, 1)))
        (ev.value.sum() + ev.log_prob.sum()).backward()
    for name, p in driver.module.named_parameters():
        if driver.reset in ("detach", "never") or "initial_" not in name:
            assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_initial_state_follows_the_module_and_can_be_used_in_backward(make, dtype):
    driver = make()
    driver.module.to(dtype)
    with torch.inference_mode():
        state = driver.initial_state(2)
        warm_up(driver, 2)
        snapshot = driver.start_state(2)
    obs, actions = driver.observations(3, 2), torch.zeros(3, 2, dtype=torch.long)
    for start in (state, snapshot):
        leaves = state_ops.leaves(start)
        assert [leaf.dtype for leaf in leaves] == leaf_dtypes(driver.memory.core, dtype)
        assert not any(leaf.is_inference() for leaf in leaves)
        driver.evaluate(obs, actions, start).signature.sum().backward()


def test_memory_follows_the_module_to_another_dtype(make):
    driver = make()
    warm_up(driver, 2)
    before, core = driver.carried(), driver.memory.core
    driver.module.double()
    driver.act(driver.observations(2))
    assert [leaf.dtype for leaf in driver.carried()] == leaf_dtypes(core, torch.float64)
    assert [leaf.dtype for leaf in before] == leaf_dtypes(core, torch.float32)


@for_resets("learned")
def test_a_learned_start_gets_its_gradient_from_a_reset_in_mid_segment(make):
    driver = make()
    warm_up(driver, 2)
    rollout = roll(driver, driver.observations(4, 2), flags(4, 2, (2, 0)))
    rollout.replay(driver).signature.sum().backward()
    starts = [p for name, p in driver.module.named_parameters() if "initial_" in name]
    assert starts and all(p.grad.abs().sum() > 0 for p in starts)
    driver.module.zero_grad()
    rollout.replay(driver, dones=flags(4, 2)).signature.sum().backward()
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in starts)
