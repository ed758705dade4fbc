"""What happens to memory around the steps: other batch sizes, checkpoints, resets by hand, long runs."""

from __future__ import annotations

import pytest
import torch

from conformance.episodes import assert_differs, flags, for_resets, roll, warm_up
from holdfast.training.iteration import memory_metrics


def test_training_and_evaluation_with_other_numbers_of_environments_do_not_disturb_each_other(make):
    driver, undisturbed = make(), make()
    train, few, one = driver.observations(6, 12), driver.observations(6, 5, seed=1), driver.observations(6, 1, seed=2)
    expected = roll(undisturbed, train).signature
    first = roll(driver, train[:3]).signature
    for obs in (few, one):
        evaluation = driver.agent()
        assert torch.equal(roll(evaluation, obs).signature, roll(make(), obs).signature)
    second = roll(driver, train[3:]).signature
    assert torch.equal(torch.cat([first, second]), expected)


def test_fewer_rows_than_known_environments_is_an_error_that_names_both_numbers_and_changes_nothing(make):
    driver, untouched = make(), make()
    for each in (driver, untouched):
        warm_up(each, 12)
    with pytest.raises(ValueError, match=r"5 rows.*12 environments.*env_ids=.*memory="):
        driver.act(driver.observations(5))
    obs = driver.observations(12, seed=3)
    assert torch.equal(driver.act(obs).signature, untouched.act(obs).signature)


def test_more_rows_than_known_environments_are_new_ones(make):
    driver, fresh = make(), make()
    warm_up(driver, 2)
    obs = driver.observations(5, seed=3)
    got = driver.act(obs).signature
    assert torch.equal(got[2:], fresh.act(obs).signature[2:])
    assert driver.memory.num_envs == 5


def test_weights_alone_are_in_the_state_dict_and_load_whatever_the_number_of_environments(make):
    driver = make()
    parameters = {name for name, _ in driver.module.named_parameters()}
    assert set(driver.module.state_dict()) == parameters
    warm_up(driver, 3)
    assert set(driver.module.state_dict()) == parameters
    other = make()
    warm_up(other, 7)
    other.module.load_state_dict(driver.module.state_dict())


def test_memory_saved_in_mid_episode_continues_bit_exact_and_is_a_copy(make):
    driver = make()
    warm_up(driver, 3)
    driver.reset_env_memory(1)  # a fresh row must survive as a fresh row
    saved = driver.get_memory()
    obs, ends = driver.observations(4, 3, seed=4), flags(4, 3, (2, 0))
    expected = roll(driver, obs, ends).signature
    warm_up(driver, 3)  # the copy must not notice
    resumed = make()
    resumed.set_memory(saved)
    assert torch.equal(roll(resumed, obs, ends).signature, expected)
    again = make()
    again.set_memory(saved)
    assert torch.equal(roll(again, obs, ends).signature, expected)


def test_a_snapshot_does_not_change_under_its_holder(make):
    driver = make()
    warm_up(driver, 3)
    snapshot = driver.start_state(3)
    rollout = roll(driver, driver.observations(3, 3))
    driver.act(driver.observations(2), env_ids=torch.tensor([0, 2]))
    driver.act(driver.observations(2), env_ids=torch.tensor([1, 9]))
    driver.reset_memory()
    replayed = driver.evaluate(rollout.obs, rollout.actions, snapshot)
    assert torch.equal(replayed.signature, rollout.replay(driver).signature)


def test_what_is_carried_holds_no_graph_and_a_segment_can_be_trained_on_many_times(make):
    driver = make()
    with torch.enable_grad():
        rollout = roll(driver, driver.observations(4, 2), flags(4, 2, (2, 1)))
    assert all(leaf.grad_fn is None and not leaf.requires_grad for leaf in driver.carried())
    assert not rollout.value.requires_grad and not rollout.log_prob.requires_grad
    for _ in range(3):
        rollout.replay(driver).signature.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in driver.module.parameters() if p.grad is not None)
    assert all(leaf.grad_fn is None for leaf in driver.carried())


def test_training_neither_reads_nor_writes_memory(make):
    driver = make()
    warm_up(driver, 2)
    rollout = roll(driver, driver.observations(3, 2))
    before = [leaf.clone() for leaf in driver.carried()]
    first = rollout.replay(driver).signature
    assert all(torch.equal(a, b) for a, b in zip(before, driver.carried()))
    driver.reset_memory()
    assert torch.equal(rollout.replay(driver).signature, first)


def test_a_bare_observation_works(make):
    step = make().act(make().observations(2))
    assert step.value.shape == (2,) and step.log_prob.shape == (2,) and len(step.action) == 2


def test_a_step_call_with_a_whole_sequence_raises_and_leaves_memory_alone(make):
    driver = make()
    for sequence in (driver.observations(4, 3), driver.observations(4, 1)):
        with pytest.raises((ValueError, RuntimeError)):
            driver.act(sequence)
    assert driver.memory.num_envs == 0


def test_after_reset_memory_the_next_step_is_a_first_step(make):
    driver, fresh = make(), make()
    obs = driver.observations(3, seed=2)
    first = fresh.act(obs).signature
    warm_up(driver, 3)
    assert_differs(driver.act(obs).signature, first)
    driver.reset_memory()
    assert torch.equal(driver.act(obs).signature, first)


def test_after_reset_env_memory_that_environment_alone_is_fresh(make):
    driver, other, fresh = make(), make(), make()
    for each in (driver, other):
        warm_up(each, 3)
    obs = driver.observations(3, seed=2)
    driver.reset_env_memory(1)
    got, kept = driver.act(obs).signature, other.act(obs).signature
    assert torch.equal(got[[0, 2]], kept[[0, 2]])
    assert torch.equal(got[1], fresh.act(obs).signature[1])


@for_resets("learned")
def test_a_fresh_row_follows_the_learned_start_as_it_is_trained(make):
    driver, later = make(), make()
    obs = driver.observations(2)
    warm_up(driver, 2)
    driver.reset_memory()
    with torch.no_grad():
        for each in (driver, later):
            for name, p in each.module.named_parameters():
                if "initial_" in name:
                    p.add_(0.5)
    assert torch.equal(driver.act(obs).signature, later.act(obs).signature)


def test_the_health_of_the_state_is_reported_with_a_nan_in_one_environment(make):
    driver = make()
    warm_up(driver, 3)
    state = driver.memory.read()
    healthy = memory_metrics(state, torch.zeros(4, 3, dtype=torch.bool))
    leaves = [leaf.flatten() for leaf in driver.carried() if leaf.is_floating_point()]
    assert healthy["memory/nan"] == 0
    assert healthy["memory/max"] == pytest.approx(torch.cat(leaves).abs().max().item())
    assert healthy["memory/rms"] == pytest.approx(torch.cat(leaves).square().mean().sqrt().item(), rel=1e-5)
    driver.carried()[0][1].view(-1)[0] = float("nan")
    assert memory_metrics(driver.memory.read(), torch.zeros(4, 3, dtype=torch.bool))["memory/nan"] == 1
