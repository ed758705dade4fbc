"""Normalized values: units, statistics by hand, values that stay when the statistics move, and every engine's gradient."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.algorithms.ppo import LossSettings, clipped_objective, in_loss_units
from holdfast.policies.actor_critic import RATE, ValueScale
from holdfast.rollout.segment import Segment
from native_gradient import NativeGradient
from ppo_parts import terms_of


def a_policy(seed: int = 0, core: str = "lstm", **options: object) -> hf.ActorCritic:
    torch.manual_seed(seed)
    box = spaces.Box(-1, 1, (3,))
    policy = hf.ActorCritic(box, spaces.Discrete(4), core, 16, normalize_value=True, **options)  # type: ignore[arg-type]
    torch.nn.init.normal_(policy.critic.weight)  # type: ignore[arg-type]
    return policy


def a_segment(policy: hf.ActorCritic, T: int = 12, B: int = 5, scale: float = 1.0) -> Segment:
    obs, resets = torch.randn(T, B, 3), torch.rand(T, B) < 0.1
    state, actions = policy.initial_state(B), torch.randint(4, (T, B))
    with torch.no_grad():
        ev = policy.evaluate(obs, actions, state, resets)
    returns = ev.value + scale * torch.randn(T, B)
    flags = torch.zeros(T, B, dtype=torch.bool)
    return Segment(
        obs=obs, actions=actions, resets=resets, rewards=torch.zeros(T, B), log_prob=ev.log_prob + 0.1 * torch.randn(T, B),
        value=ev.value, terminated=flags, truncated=flags, advantage=torch.randn(T, B), returns=returns, valid=~flags,
        start_state=state,
    )  # fmt: skip


def test_the_first_value_is_0_and_after_the_first_rollout_the_mean_of_its_returns():
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), "gru", 8, normalize_value=True)
    obs = torch.randn(6, 3)
    assert policy.act(obs).value.tolist() == [0.0] * 6
    policy.update_value_scale(torch.tensor([1000.0, 3000.0]))
    policy.reset_memory()
    assert policy.act(obs).value.tolist() == [2000.0] * 6


def test_statistics_by_hand():
    scale, last = ValueScale(), torch.nn.Linear(2, 1)
    scale.move(torch.tensor(10.0), torch.tensor(4.0), torch.tensor(8.0), last)
    assert float(scale.mean) == 10 and float(scale.std) == 2
    scale.move(torch.tensor(20.0), torch.tensor(0.0), torch.tensor(8.0), last)
    mean, square = 10 + RATE * 10, 104 + RATE * (400 - 104)
    assert float(scale.mean) == pytest.approx(mean) and float(scale.std) == pytest.approx((square - mean**2) ** 0.5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1e-3, 1.0, 1e4]), st.floats(-100, 100))
def test_values_stay_what_they_were_when_the_statistics_move(seed: int, size: float, offset: float):
    policy = a_policy(seed)
    generator = torch.Generator().manual_seed(seed)
    policy.update_value_scale(size * (torch.randn(64, generator=generator) + offset))
    obs, state = torch.randn(9, 3, generator=generator), policy.initial_state(9)
    before = policy.step(obs, state).value
    policy.update_value_scale(size * (5 * torch.randn(64, generator=generator) - offset))
    after = policy.step(obs, state).value
    assert (after - before).abs().max() <= 1e-5 * (size * (1 + abs(offset)) + before.abs().max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_returns_that_are_not_finite_move_nothing(bad: float):
    policy = a_policy()
    policy.update_value_scale(torch.randn(10))
    before = copy.deepcopy(policy.state_dict())
    policy.update_value_scale(torch.tensor([1.0, bad]))
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_returns_that_are_all_the_same_leave_the_unit_at_1_until_they_differ():
    policy = a_policy()
    for _ in range(3):
        policy.update_value_scale(torch.full((10,), 7.0))
    assert policy.value_scale is not None
    assert float(policy.value_scale.mean) == 7 and float(policy.value_scale.std) == 1
    policy.update_value_scale(torch.tensor([6.0, 1006.0]))
    assert float(policy.value_scale.mean) == 506 and float(policy.value_scale.std) == 500


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_the_loss_does_not_depend_on_the_size_of_rewards(size: float):
    losses = []
    for factor in (1.0, size):
        policy = a_policy(3)
        torch.manual_seed(5)
        segment = a_segment(policy)
        segment = replace(segment, returns=segment.returns * factor)
        policy.update_value_scale(segment.returns.flatten())
        segment = in_loss_units(segment, policy.value_scale)
        losses.append(float(terms_of(policy, segment).value_loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_in_c_is_autograds(core: str, seed: int):
    policy = a_policy(seed, core, critic_core=("shared", "separate")[seed % 2])
    policy.update_value_scale(300 * torch.randn(50) - 1000)
    segment = in_loss_units(a_segment(policy, scale=300.0), policy.value_scale)
    loss_settings = LossSettings(clip_value=(None, 0.1)[seed % 2])
    double = copy.deepcopy(policy).double()
    wide = replace(
        segment, **{n: getattr(segment, n).double() for n in ("obs", "log_prob", "value", "advantage", "returns")}
    )
    wide = replace(wide, start_state=double.initial_state(segment.num_envs))
    new = double.evaluate(wide.obs, wide.actions, wide.start_state, wide.resets)
    assert double.value_scale is not None
    value = double.value_scale.to_loss_units(new.value)
    clipped_objective(new.log_prob, new.entropy, value, wide, loss_settings).loss.backward()
    NativeGradient(policy, loss_settings)(segment)
    for (name, mine), theirs in zip(policy.named_parameters(), double.parameters()):
        assert mine.grad is not None and theirs.grad is not None, name
        assert (mine.grad - theirs.grad).abs().max() <= 2e-5 * theirs.grad.abs().max() + 1e-7, name


def test_ppo_loss_of_your_own_loop_is_in_normalized_units():
    policy = a_policy(1)
    policy.update_value_scale(1e4 * torch.randn(100))
    assert hf.ppo_loss(policy, a_segment(policy, scale=1e4)).item() < 10


def test_statistics_are_saved_with_the_weights():
    policy, other = a_policy(1), a_policy(2)
    policy.update_value_scale(50 * torch.randn(20) + 3)
    other.load_state_dict(policy.state_dict())
    obs, state = torch.randn(4, 3), policy.initial_state(4)
    assert torch.equal(policy.step(obs, state).value, other.step(obs, state).value)


def test_a_policy_that_always_gets_the_same_return_does_not_shrink_the_unit_to_the_errors_of_its_critic():
    policy = a_policy()
    policy.update_value_scale(torch.tensor([0.0, 2.0]))
    for _ in range(200):
        policy.update_value_scale(1e-3 * torch.randn(50))
    assert policy.value_scale is not None and float(policy.value_scale.std) == pytest.approx(0.1, rel=1e-3)
