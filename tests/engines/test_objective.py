"""The objective by hand (one autograd node) and in C against the page in `algorithms/ppo.py`, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.algorithms.ppo import LossSettings, PPOTerms, clipped_objective
from holdfast.engines.objective import fused_objective
from holdfast.kernels.cpu import recurrence as native
from holdfast.kernels.cpu.objective import StoredSteps, clipped
from holdfast.policies.heads import Categorical
from holdfast.rollout.segment import Segment

SETTINGS = {
    "plain": LossSettings(),
    "clipped values": LossSettings(clip_value=0.1, value_coef=0.7),
    "entropy": LossSettings(clip_range=0.05, entropy_coef=0.2),
}


def normal(*shape: int, random: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)


def stored(T: int, B: int, random: torch.Generator) -> Segment:
    """What a rollout could have stored; a fifth of the steps are dummy steps."""
    flags = torch.zeros(T, B, dtype=torch.bool)
    return Segment(
        obs=flags, actions=flags, resets=flags, rewards=flags, terminated=flags, truncated=flags, start_state={},
        log_prob=normal(T, B, random=random), value=normal(T, B, random=random), advantage=normal(T, B, random=random),
        returns=normal(T, B, random=random), valid=torch.rand(T, B, generator=random) < 0.8,
    )  # fmt: skip


def new(old: Segment, random: torch.Generator) -> list[Tensor]:
    """Log-probabilities, entropies and values of a policy that has moved, some of it out of the clipping range."""
    T, B = old.resets.shape
    moved = [old.log_prob + 0.3 * normal(T, B, random=random), normal(T, B, random=random).abs()]
    return [x.requires_grad_() for x in (*moved, old.value + 0.2 * normal(T, B, random=random))]


def terms_and_gradients(objective, inputs: list[Tensor], *rest) -> tuple[PPOTerms, tuple[Tensor, ...]]:
    terms = objective(*inputs, *rest)
    return terms, torch.autograd.grad(terms.loss, inputs)


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(1, 9), B=st.integers(1, 5), seed=st.integers(0, 10**6), case=st.sampled_from(sorted(SETTINGS)),
    all_valid=st.booleans(),
)  # fmt: skip
def test_the_fused_objective_is_the_page(T: int, B: int, seed: int, case: str, all_valid: bool):
    random = torch.Generator().manual_seed(seed)
    old = stored(T, B, random)
    inputs = new(old, random)
    wanted, wanted_grads = terms_and_gradients(clipped_objective, inputs, old, SETTINGS[case], all_valid)
    got, grads = terms_and_gradients(fused_objective, inputs, old, SETTINGS[case], all_valid)
    torch.testing.assert_close(tuple(got), tuple(wanted), rtol=1e-12, atol=1e-13, check_dtype=False)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("objective", [clipped_objective, fused_objective])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_dummy_steps_may_hold_anything(objective, bad: float):
    random = torch.Generator().manual_seed(1)
    old = stored(5, 3, random)
    inputs = new(old, random)
    wanted, wanted_grads = terms_and_gradients(objective, inputs, old, SETTINGS["clipped values"])
    spoiled = {
        name: getattr(old, name).masked_fill(~old.valid, bad) for name in ("log_prob", "value", "advantage", "returns")
    }
    worse = [x.detach().masked_fill(~old.valid, bad).requires_grad_() for x in inputs]
    got, grads = terms_and_gradients(objective, worse, replace(old, **spoiled), SETTINGS["clipped values"])
    torch.testing.assert_close(tuple(got), tuple(wanted))
    torch.testing.assert_close(grads, wanted_grads)
    assert all(not grad[~old.valid].any() for grad in grads)


@pytest.mark.parametrize("objective", [clipped_objective, fused_objective])
@pytest.mark.parametrize("part", ["log_prob", "advantage", "returns"])
def test_a_real_step_that_is_not_finite_makes_the_loss_so(objective, part: str):
    random = torch.Generator().manual_seed(2)
    old = stored(4, 2, random)
    getattr(old, part)[1, 0] = math.nan
    old.valid[1, 0] = True
    assert not objective(*new(old, random), old, LossSettings()).loss.isfinite()


@pytest.mark.parametrize("objective", [clipped_objective, fused_objective])
def test_a_minibatch_of_dummy_steps_alone_has_loss_0(objective):
    random = torch.Generator().manual_seed(3)
    old = replace(stored(2, 2, random), valid=torch.zeros(2, 2, dtype=torch.bool))
    terms, grads = terms_and_gradients(objective, new(old, random), old, LossSettings())
    assert terms.loss.item() == 0 and not any(grad.any() for grad in grads)


@pytest.mark.skipif(not native.in_use(), reason="no native kernel")
@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 9), B=st.integers(1, 5), actions=st.integers(1, 40), seed=st.integers(0, 10**6),
    case=st.sampled_from(sorted(SETTINGS)), all_valid=st.booleans(),
)  # fmt: skip
def test_the_objective_in_c_is_the_page(T: int, B: int, actions: int, seed: int, case: str, all_valid: bool):
    random = torch.Generator().manual_seed(seed)
    old = stored(T, B, random)
    logits, value = normal(T * B, actions, random=random), old.value + 0.2 * normal(T, B, random=random)
    chosen = torch.randint(actions, (T * B,), generator=random)
    with torch.no_grad():
        old.log_prob = torch.log_softmax(logits, 1).gather(1, chosen[:, None]).view(T, B)
        old.log_prob = (old.log_prob + 0.3 * normal(T, B, random=random)).float().double()
    for name in ("value", "advantage", "returns"):
        setattr(old, name, getattr(old, name).float().double())  # C works on float32: give both the same numbers
    logits, value = (x.float().double().requires_grad_() for x in (logits, value))
    spread = torch.log_softmax(logits, 1)
    log_prob, entropy = spread.gather(1, chosen[:, None]).view(T, B), -(spread.exp() * spread).sum(1).view(T, B)
    wanted = clipped_objective(log_prob, entropy, value, old, SETTINGS[case], all_valid)
    d_logits, d_value = torch.autograd.grad(wanted.loss, (logits, value))
    kept = [getattr(old, name).float() for name in ("log_prob", "value", "advantage", "returns")]
    steps = StoredSteps(*kept, None if all_valid else old.valid)
    got = clipped(logits.detach().float(), chosen, value.detach().float(), steps, SETTINGS[case])
    # Ratios of up to e**1.5 and sums of up to 45 terms of order 1, in float32.
    torch.testing.assert_close(got[0].double(), d_logits, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(got[1].double().view_as(d_value), d_value, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(
        got[2].double(), torch.stack([x.detach().double() for x in wanted]), rtol=1e-4, atol=2e-6
    )


def test_the_c_objective_speaks_of_the_library_s_categorical():
    """The entropy and log-probability that the test above writes out are those of `heads.Categorical`."""
    random = torch.Generator().manual_seed(4)
    logits, chosen = normal(6, 5, random=random), torch.randint(5, (6,), generator=random)
    dist, spread = Categorical(logits), torch.log_softmax(logits, 1)
    torch.testing.assert_close(dist.log_prob(chosen), spread.gather(1, chosen[:, None]).squeeze(1))
    torch.testing.assert_close(dist.entropy(), -(spread.exp() * spread).sum(1))
