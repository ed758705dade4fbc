"""The scale of rewards: the deviation of discounted returns, over real steps and within episodes."""

from __future__ import annotations

import pytest
import torch

from holdfast.rollout.reward_scale import RewardScale


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)


def flags(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).bool().unsqueeze(1)


def test_rewards_are_divided_by_the_deviation_of_returns_that_start_over_in_each_episode():
    scale = RewardScale(1, gamma=0.5)
    assert scale.value == 1.0
    # returns so far: 4, 4/2 + 4 = 6 | the episode ended: 2, 2/2 + 0 = 1; mean 3.25, deviations .75 2.75 -1.25 -2.25
    scale.update(column(4, 4, 2, 0), flags(0, 1, 0, 0), flags(1, 1, 1, 1))
    variance = (0.75**2 + 2.75**2 + 1.25**2 + 2.25**2) / 4
    assert scale.value == pytest.approx(variance**-0.5, rel=1e-3)
    assert scale.open_return.tolist() == [1.0]


def test_dummy_steps_neither_discount_nor_count():
    plain, with_dummies = RewardScale(1, gamma=0.5), RewardScale(1, gamma=0.5)
    plain.update(column(4, 4, 2, 0), flags(0, 1, 0, 0), flags(1, 1, 1, 1))
    with_dummies.update(column(4, 4, 0, 2, 0), flags(0, 1, 0, 0, 0), flags(1, 1, 0, 1, 1))
    assert plain.state_dict() == with_dummies.state_dict()


def test_two_rollouts_give_the_statistics_of_both_together():
    torch.manual_seed(0)
    rewards, dones = torch.randn(20, 3), torch.rand(20, 3) < 0.2
    valid = torch.ones_like(dones)
    halves, whole = RewardScale(3, gamma=0.9), RewardScale(3, gamma=0.9)
    halves.update(rewards[:8], dones[:8], valid[:8])
    halves.update(rewards[8:], dones[8:], valid[8:])
    whole.update(rewards, dones, valid)
    assert halves.var == pytest.approx(whole.var) and halves.mean == pytest.approx(whole.mean)
    assert torch.equal(halves.open_return, whole.open_return)


def test_a_saved_scale_goes_on_the_same_and_open_episodes_can_be_dropped():
    first, second = RewardScale(2, gamma=0.9), RewardScale(2, gamma=0.9)
    ones, no = torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool)
    first.update(ones, no, ~no)
    second.load_state_dict(first.state_dict())
    for scale in (first, second):
        scale.update(2 * ones, no, ~no)
    assert first.value == second.value and torch.equal(first.open_return, second.open_return)
    second.drop_open_episodes()
    assert not second.open_return.any() and second.value == first.value


def test_rewards_that_are_always_zero_are_left_alone_and_finite():
    scale = RewardScale(1, gamma=0.9)
    scale.update(torch.zeros(4, 1), flags(0, 0, 0, 0), flags(1, 1, 1, 1))
    assert scale.value == 1.0


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_returns_of_any_size_are_scaled_to_deviation_one(size: float):
    usual, other = RewardScale(1, gamma=0.5), RewardScale(1, gamma=0.5)
    for scale, factor in ((usual, 1.0), (other, size)):
        scale.update(column(4, 4, 2, 0) * factor, flags(0, 1, 0, 0), flags(1, 1, 1, 1))
    assert other.value * size == pytest.approx(usual.value, rel=1e-5)


def test_equal_returns_are_scaled_by_their_size_and_not_by_rounding():
    scale = RewardScale(1, gamma=0.0)
    scale.update(torch.full((100, 1), 0.1), torch.zeros(100, 1).bool(), torch.ones(100, 1).bool())
    assert scale.value <= 1e6 / 0.1 * (1 + 1e-6)
