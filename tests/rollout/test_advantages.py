"""Advantages worked out by hand, and which observations begin an episode."""

from __future__ import annotations

import re

import pytest
import torch
from gymnasium.vector import AutoresetMode

import holdfast as hf


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)


def flags(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).bool().unsqueeze(1)


def test_advantages_of_one_unbroken_episode():
    # deltas: 1 + 0.5*4 - 2 = 1,  1 + 0.5*6 - 4 = 0,  1 + 0.5*8 - 6 = -1;  each carries 0.25 of the next advantage
    advantage, returns = hf.gae(column(1, 1, 1), column(2, 4, 6), column(4, 6, 8), flags(0, 0, 0), gamma=0.5, lam=0.5)
    assert advantage.squeeze(1).tolist() == [1 + 0.25 * -0.25, -0.25, -1.0]
    assert torch.equal(returns, advantage + column(2, 4, 6))


def test_an_end_stops_the_sum_of_later_advantages_whichever_kind_it_is():
    # step 1 ends: terminated in column 0 (nothing follows), truncated in column 1 (10 follows)
    rewards, values = column(1, 1, 5).repeat(1, 2), torch.zeros(3, 2)
    next_values = torch.tensor([[0.0, 0.0], [0.0, 10.0], [0.0, 0.0]])
    dones = flags(0, 1, 0).repeat(1, 2)
    advantage, _ = hf.gae(rewards, values, next_values, dones, gamma=0.5, lam=1.0)
    assert advantage.T.tolist() == [[1.5, 1.0, 5.0], [1 + 0.5 * 6, 6.0, 5.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_episode(bad: float):
    rewards, nothing = torch.ones(4, 2), torch.zeros(4, 2)
    dones = torch.tensor([[False, False], [True, False], [False, False], [False, False]])
    rewards[3, 0] = bad
    advantage, _ = hf.gae(rewards, nothing, nothing, dones, gamma=0.5, lam=1.0)
    assert advantage[:2, 0].tolist() == [1.5, 1.0] and not bool(advantage[2:, 0].isfinite().any())
    assert advantage[:, 1].tolist() == [1.875, 1.75, 1.5, 1.0]


def test_lambda_zero_is_the_one_step_error_and_lambda_one_the_discounted_return():
    torch.manual_seed(0)
    rewards, values, last = torch.randn(6, 3), torch.randn(6, 3), torch.randn(1, 3)
    next_values, no_ends = torch.cat([values[1:], last]), torch.zeros(6, 3, dtype=torch.bool)
    one_step, _ = hf.gae(rewards, values, next_values, no_ends, gamma=0.9, lam=0.0)
    torch.testing.assert_close(one_step, rewards + 0.9 * next_values - values)
    _, returns = hf.gae(rewards, values, next_values, no_ends, gamma=0.9, lam=1.0)
    discounted = last[0]
    for t in reversed(range(6)):
        discounted = rewards[t] + 0.9 * discounted
        torch.testing.assert_close(returns[t], discounted)


def test_resets_follow_the_same_step_in_same_step_and_disabled_modes():
    terminated, truncated = flags(0, 1, 0, 0), flags(0, 0, 0, 1)
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED, "same_step", "SameStep"):
        assert hf.resets_from(terminated, truncated, mode).squeeze(1).tolist() == [False, True, False, True]


def test_resets_come_one_step_later_in_next_step_mode():
    terminated, truncated = flags(0, 1, 0, 0), flags(0, 0, 0, 1)
    late = hf.resets_from(terminated, truncated, AutoresetMode.NEXT_STEP)
    assert late.squeeze(1).tolist() == [False, False, True, False]
    carried = hf.resets_from(terminated, truncated, "NextStep", previous_done=torch.tensor([True]))
    assert carried.squeeze(1).tolist() == [True, False, True, False]


def test_resets_of_a_single_step():
    ended = torch.tensor([True, False])
    nothing = torch.zeros(2, dtype=torch.bool)
    assert hf.resets_from(ended, nothing, AutoresetMode.SAME_STEP).tolist() == [True, False]
    assert hf.resets_from(ended, nothing, AutoresetMode.NEXT_STEP).tolist() == [False, False]
    assert hf.resets_from(nothing, nothing, AutoresetMode.NEXT_STEP, previous_done=ended).tolist() == [True, False]


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown autoreset mode 'sometimes'"):
        hf.resets_from(flags(0), flags(0), "sometimes")


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_of_no_steps_or_no_environments_there_are_no_advantages(shape: tuple[int, int]):
    nothing = torch.zeros(shape)
    advantage, returns = hf.gae(nothing, nothing, nothing, nothing.bool())
    assert advantage.shape == returns.shape == shape


def test_nothing_is_broadcast():
    rewards, dones = torch.randn(3, 2), torch.zeros(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"gae got next_values of shape \(2,\), expected \(3, 2\) as rewards \[T, B\]"):
        hf.gae(rewards, rewards, torch.zeros(2), dones)
    with pytest.raises(ValueError, match=r"gae got values of shape \(3, 2, 1\), expected \(3, 2\)"):
        hf.gae(rewards, rewards.unsqueeze(2), rewards, dones)
    with pytest.raises(ValueError, match=r"gae got rewards \[T, B\] of shape \(3,\)"):
        hf.gae(rewards[:, 0], rewards[:, 0], rewards[:, 0], dones[:, 0])
    with pytest.raises(TypeError, match=r"gae got dones of dtype torch.float32, expected flags of dtype bool"):
        hf.gae(rewards, rewards, rewards, dones.float())
    with pytest.raises(ValueError, match=r"resets_from got truncated of shape \(2,\), expected \(3, 2\)"):
        hf.resets_from(dones, dones[0], AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("steps", [(), (4,)])
def test_flags_of_the_step_before_are_one_per_environment(steps: tuple[int, ...]):
    now = torch.zeros(*steps, 2, dtype=torch.bool)
    for shape in (3, 2), (3,), (1,), ():
        said = rf"resets_from got previous_done of shape {re.escape(str(shape))}, expected \[B\] = \(2,\)"
        with pytest.raises(ValueError, match=said):
            hf.resets_from(now, now, AutoresetMode.NEXT_STEP, previous_done=torch.zeros(shape, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"resets_from got previous_done of dtype torch.float32, expected flags"):
        hf.resets_from(now, now, AutoresetMode.NEXT_STEP, previous_done=torch.zeros(2))
