"""Action distributions: numbers checked by hand or against torch.distributions; masks forbid, and give no gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions as td

import holdfast as hf
from holdfast.policies import heads
from holdfast.policies.heads import Bernoulli, Categorical, Gaussian, MultiCategorical, SquashedGaussian


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_categorical_agrees_with_torch():
    logits = torch.randn(7, 4)
    mine, theirs = Categorical(logits), td.Categorical(logits=logits)
    actions = torch.arange(7) % 4
    torch.testing.assert_close(mine.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(mine.entropy(), theirs.entropy())
    assert torch.equal(mine.mode, theirs.mode)


def test_samples_have_the_distributions_frequencies():
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    samples = Categorical(p.log().expand(40_000, 4)).sample()
    frequencies = torch.bincount(samples, minlength=4) / 40_000
    assert (frequencies - p).abs().max() < 4 * math.sqrt(0.25 / 40_000)


def test_numbering_from_a_start_shifts_actions_and_nothing_else():
    logits = torch.randn(5, 3)
    shifted, plain = Categorical(logits, start=-1), Categorical(logits)
    assert torch.equal(shifted.mode, plain.mode - 1)
    torch.testing.assert_close(shifted.log_prob(shifted.mode), plain.log_prob(plain.mode))
    assert set(shifted.sample().tolist()) <= {-1, 0, 1}


def test_a_forbidden_action_has_no_probability_entropy_or_gradient():
    logits = torch.zeros(1, 3, requires_grad=True)
    dist = Categorical(logits, torch.tensor([[True, False, True]]))
    torch.testing.assert_close(dist.log_prob(torch.tensor([0])), torch.tensor([math.log(0.5)]))
    torch.testing.assert_close(dist.entropy(), torch.tensor([math.log(2)]))
    assert dist.log_prob(torch.tensor([1])).item() == -math.inf
    (dist.entropy().sum() + dist.log_prob(torch.tensor([2])).sum()).backward()
    assert logits.grad[0, 1] == 0 and torch.isfinite(logits.grad).all()
    many = Categorical(torch.randn(500, 3), torch.tensor([True, False, True]).expand(500, 3))
    assert 1 not in many.sample().tolist() and 1 not in many.mode.tolist()


def test_only_one_action_allowed_is_certain():
    dist = Categorical(torch.randn(4, 5), torch.eye(5, dtype=torch.bool)[:4])
    assert dist.sample().tolist() == [0, 1, 2, 3]
    assert dist.entropy().abs().max() == 0 and dist.log_prob(torch.arange(4)).abs().max() == 0


def test_several_heads_are_the_sum_of_their_parts():
    logits = torch.randn(6, 2 + 3)
    dist = MultiCategorical(logits, [2, 3])
    parts = [td.Categorical(logits=part) for part in logits.split([2, 3], -1)]
    action = torch.tensor([[0, 2]] * 6)
    torch.testing.assert_close(dist.log_prob(action), parts[0].log_prob(action[:, 0]) + parts[1].log_prob(action[:, 1]))
    torch.testing.assert_close(dist.entropy(), parts[0].entropy() + parts[1].entropy())
    assert dist.sample().shape == (6, 2) and dist.full_log_probs.shape == (6, 5)


def test_one_mask_for_all_heads_is_split_as_their_logits_are():
    mask = torch.tensor([True, False, False, True, True]).expand(200, 5)
    samples = MultiCategorical(torch.randn(200, 5), [2, 3], mask).sample()
    assert set(samples[:, 0].tolist()) == {0} and set(samples[:, 1].tolist()) == {1, 2}


def dependent_mask(n):
    """Head 1 has 3 actions: after choice 0 only action 2, after choice 1 actions 0 and 1."""
    return torch.tensor([[False, False, True], [True, True, False]]).expand(n, 2, 3)


def test_a_head_that_depends_on_another_uses_the_chosen_row_when_acting_and_when_evaluating():
    logits = torch.randn(300, 5)
    dist = MultiCategorical(logits, [2, 3], [None, dependent_mask(300)])
    for action in (dist.sample(), dist.mode):
        allowed = dependent_mask(300)[torch.arange(300), action[:, 0]]
        assert allowed[torch.arange(300), action[:, 1]].all()
        assert torch.isfinite(dist.log_prob(action)).all()
    # By hand: choice 0 leaves one action, so only head 0 has a say.
    zero_two = torch.tensor([[0, 2]]).expand(300, 2)
    torch.testing.assert_close(dist.log_prob(zero_two), logits[:, :2].log_softmax(-1)[:, 0])
    one_zero = torch.tensor([[1, 0]]).expand(300, 2)
    expected = logits[:, :2].log_softmax(-1)[:, 1] + logits[:, 2:4].log_softmax(-1)[:, 0]
    torch.testing.assert_close(dist.log_prob(one_zero), expected)
    assert (dist.log_prob(torch.tensor([[0, 0]]).expand(300, 2)) == -math.inf).all()
    # Probabilities of all joint actions sum to one.
    joint = [dist.log_prob(torch.tensor([[i, j]]).expand(300, 2)).exp() for i in range(2) for j in range(3)]
    torch.testing.assert_close(torch.stack(joint).sum(0), torch.ones(300))


def test_a_head_may_depend_on_any_earlier_head():
    masks = [None, None, dependent_mask(4)]
    dist = MultiCategorical(torch.randn(4, 2 + 2 + 3), [2, 2, 3], masks, parents={2: 0})
    assert dist.log_prob(torch.tensor([[0, 1, 2]]).expand(4, 3)).isfinite().all()
    assert (dist.log_prob(torch.tensor([[1, 0, 2]]).expand(4, 3)) == -math.inf).all()
    with pytest.raises(ValueError, match="no earlier head"):
        MultiCategorical(torch.randn(4, 5), [2, 3], [dependent_mask(4), None])


def test_a_row_nobody_can_choose_may_forbid_everything():
    only_one = torch.tensor([False, True]).expand(3, 2)
    rows = torch.tensor([[False, False, False], [True, True, False]]).expand(3, 2, 3)
    dist = MultiCategorical(torch.randn(3, 5), [2, 3], [only_one, rows])
    assert dist.sample()[:, 0].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="head 1 given head 0 forbids every action"):
        MultiCategorical(torch.randn(3, 5), [2, 3], [None, rows])


def test_bits_agree_with_torch_and_a_forbidden_bit_is_zero():
    logits = torch.randn(6, 4)
    mine, theirs = Bernoulli(logits), td.Independent(td.Bernoulli(logits=logits), 1)
    action = torch.randint(0, 2, (6, 4))
    torch.testing.assert_close(mine.log_prob(action), theirs.log_prob(action.float()))
    torch.testing.assert_close(mine.entropy(), theirs.entropy())
    mask = torch.tensor([True, True, False, True]).expand(6, 4)
    masked = Bernoulli(logits.clone().requires_grad_(), mask)
    assert (masked.sample()[:, 2] == 0).all() and (masked.mode[:, 2] == 0).all()
    rest = [0, 1, 3]
    without = Bernoulli(logits[:, rest])
    torch.testing.assert_close(masked.entropy(), without.entropy())
    torch.testing.assert_close(masked.log_prob(masked.mode), without.log_prob(masked.mode[:, rest]))


def test_gaussian_agrees_with_torch_and_keeps_the_spaces_shape():
    mean, log_std = torch.randn(5, 6), torch.randn(6) * 0.3
    mine = Gaussian(mean, log_std, (2, 3))
    theirs = td.Independent(td.Normal(mean, log_std.exp()), 1)
    action = mine.sample()
    assert action.shape == (5, 2, 3) and mine.mode.shape == (5, 2, 3)
    torch.testing.assert_close(mine.log_prob(action), theirs.log_prob(action.view(5, 6)))
    torch.testing.assert_close(mine.entropy(), theirs.entropy())


BAD_MASKS = {
    "forbids everything": (torch.tensor([[True, True], [False, False]]), ValueError, "forbids every action in row 1"),
    "numbers": (torch.ones(2, 2), TypeError, "float32.*bool"),
    "shape": (torch.ones(2, 3, dtype=torch.bool), ValueError, r"\(2, 3\), expected \(2, 2\)"),
    "one row": (torch.ones(2, dtype=torch.bool), ValueError, r"\(2,\), expected \(2, 2\)"),
    "a list": ([[True, True], [True, True]], TypeError, "list.*bool tensor"),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_wrong_masks_are_refused(case):
    mask, error, words = BAD_MASKS[case]
    with pytest.raises(error, match=words):
        Categorical(torch.zeros(2, 2), mask)
    if case != "forbids everything":
        with pytest.raises(error, match=words):
            Bernoulli(torch.zeros(2, 2), mask)


def test_wrong_masks_for_several_heads_are_refused():
    logits = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"\(2, 4\), expected \[N, 5\].*list with one mask per head"):
        MultiCategorical(logits, [2, 3], torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="got 1 action masks for 2 heads"):
        MultiCategorical(logits, [2, 3], [None])
    with pytest.raises(ValueError, match=r"head 1 has shape \(2, 2\), expected \(2, 3\)"):
        MultiCategorical(logits, [2, 3], [None, torch.ones(2, 2, dtype=torch.bool)])


def test_under_the_compiler_values_are_not_looked_at_and_debugging_does_not_break_it():
    def log_probs(logits, mask):
        return Categorical(logits, mask).log_probs

    compiled = torch.compile(log_probs, fullgraph=True, backend="eager")
    hf.debug(True)
    try:
        assert compiled(torch.zeros(2, 2), torch.tensor([[True, False], [False, True]])).shape == (2, 2)
    finally:
        hf.debug(False)


@pytest.mark.parametrize("mean, log_std", [(0.0, 0.0), (0.3, -1.0), (-2.0, 0.5)])
def test_a_squashed_gaussian_is_a_density_over_its_bounds_with_the_stated_entropy(mean: float, log_std: float):
    center, half_range = torch.tensor([1.0]).double(), torch.tensor([2.5]).double()
    x = torch.linspace(-1.5 + 1e-7, 3.5 - 1e-7, 400_001, dtype=torch.float64).unsqueeze(1)
    out = torch.full_like(x, mean)
    dist = SquashedGaussian(out, torch.tensor([log_std]).double(), center, half_range)
    p = dist.log_prob(x).exp()
    assert float(torch.trapezoid(p, x.squeeze(1))) == pytest.approx(1.0, abs=2e-3)
    entropy = torch.trapezoid(torch.where(p > 0, -p * p.log(), 0.0), x.squeeze(1))
    assert float(dist.entropy()[0]) == pytest.approx(float(entropy), abs=0.03)


def test_a_squashed_gaussian_stays_inside_its_bounds_and_its_log_prob_stays_finite():
    dist = SquashedGaussian(torch.full((1000, 2), 8.0), torch.ones(2), torch.zeros(2), torch.tensor([1.0, 3.0]))
    action = dist.sample()
    assert (action.abs() <= torch.tensor([1.0, 3.0])).all()
    assert dist.log_prob(action).isfinite().all() and dist.log_prob(dist.mode).isfinite().all()


def test_noise_is_used_by_gaussians_of_torch_too_and_by_no_other_distribution():
    mean, std, noise = torch.randn(5, 2), torch.rand(5, 2) + 0.1, torch.randn(5, 2)
    normal = torch.distributions.Normal(mean, std)
    for dist in (normal, torch.distributions.Independent(normal, 1), heads.Gaussian(mean, std.log(), (2,))):
        torch.testing.assert_close(heads.draw_action(dist, noise), mean + std * noise)
    beta = torch.distributions.Independent(torch.distributions.Beta(std, std), 1)
    assert heads.draw_action(beta, noise).shape == (5, 2) and heads.draw_action(normal, None).shape == (5, 2)
    assert heads.draw_action(torch.distributions.Categorical(logits=mean), noise).shape == (5,)
