"""PPO's objective in C against the page in `algorithms/ppo.py`, for every instruction set this CPU has."""

from __future__ import annotations

import pytest
import torch

from holdfast.algorithms.ppo import LossSettings, clipped_objective
from holdfast.kernels.cpu import library
from holdfast.kernels.cpu.update import PreparedObjective, StoredSteps
from holdfast.policies.heads import Categorical
from holdfast.rollout.segment import Segment

pytestmark = pytest.mark.skipif(library.load().handle is None, reason=f"no native kernel: {library.load().reason}")


@pytest.mark.parametrize("actions", [1, 2, 16, 50])
@pytest.mark.parametrize("clip_value", [None, 0.1])
@pytest.mark.parametrize("some_valid", [False, True])
def test_the_objective_and_its_gradient_are_autograds(
    isa: str, actions: int, clip_value: float | None, some_valid: bool
):
    torch.manual_seed(1)
    n = 60
    logits, value, advantage, returns = torch.randn(n, actions), *torch.randn(3, n)
    chosen = torch.randint(actions, (n,))
    old_log_prob = Categorical(logits).log_prob(chosen) + 0.3 * torch.randn(n)
    old_value = value + 0.2 * torch.randn(n)
    valid = torch.rand(n) < 0.7 if some_valid else None
    options = (0.2, clip_value, 0.03, 0.7)
    steps = StoredSteps(old_log_prob, old_value, advantage, returns, valid)
    objective = PreparedObjective(logits, chosen, value, steps, options)
    objective()
    d_logits, d_value, terms = objective.d_logits, objective.d_value, objective.terms

    exact_logits, exact_value = logits.double().requires_grad_(), value.double().requires_grad_()
    dist = Categorical(exact_logits)
    anything = torch.zeros(n)
    old = Segment(
        obs=anything, actions=anything, resets=anything, rewards=anything, terminated=anything, truncated=anything,
        start_state={}, log_prob=old_log_prob.double(), value=old_value.double(), advantage=advantage.double(),
        returns=returns.double(), valid=torch.ones(n, dtype=torch.bool) if valid is None else valid,
    )  # fmt: skip
    now = (dist.log_prob(chosen), dist.entropy(), exact_value)
    expected = clipped_objective(*now, old, LossSettings(*options), all_valid=valid is None)
    expected.loss.backward()
    assert terms.tolist() == pytest.approx([float(term.detach()) for term in expected], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(d_logits.double(), exact_logits.grad, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(d_value.double(), exact_value.grad, rtol=1e-5, atol=1e-8)


def test_probabilities_far_apart_stay_finite(isa: str):
    logits = torch.tensor([[0.0, -500.0, 80.0], [1e30, 0.0, -1e30]])
    one = torch.ones(2)
    old = StoredSteps(0 * one, one, one, one, None)
    objective = PreparedObjective(logits, torch.tensor([2, 0]), one, old, (0.2, None, 0.01, 0.5))
    objective()
    assert objective.d_logits.isfinite().all() and objective.terms.isfinite().all()
