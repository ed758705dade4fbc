"""Dict and Tuple action spaces: masks of all parts side by side, and policies that play them, by hand and against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as td

import holdfast as hf
from holdfast.doctor.subjects.holdfast import Holdfast
from holdfast.policies import heads
from holdfast.policies.action_parts import joined_mask, mask_sizes, split_mask
from holdfast.state import leaves, tree_map
from part_actions import OBS, SPACES, nested

KINDS = list(SPACES)


def factored(n=6, **masks):
    """A choice of 3, two numbers and two bits, and the same as distributions of torch."""
    logits, mean, log_std, bits = torch.randn(n, 3), torch.randn(n, 2), torch.randn(2), torch.randn(n, 2)
    mine = {"a": heads.Categorical(logits, masks.get("a")), "b": (heads.Gaussian(mean, log_std), heads.Bernoulli(bits))}
    theirs = [
        td.Categorical(logits=logits), td.Independent(td.Normal(mean, log_std.exp()), 1),
        td.Independent(td.Bernoulli(logits=bits), 1),
    ]  # fmt: skip
    return heads.Factored(mine), theirs


def test_scores_and_entropies_are_the_sums_of_torchs():
    dist, theirs = factored()
    action = dist.sample()
    assert action.keys() == {"a", "b"} and [x.shape for x in leaves(action)] == [(6,), (6, 2), (6, 2)]
    want = sum(t.log_prob(x if x.is_floating_point() else x.float()) for t, x in zip(theirs, leaves(action)))
    torch.testing.assert_close(dist.log_prob(action), want)
    torch.testing.assert_close(dist.entropy(), sum(t.entropy() for t in theirs))
    assert torch.equal(dist.mode["a"], theirs[0].probs.argmax(-1)) and torch.equal(dist.mode["b"][0], theirs[1].mean)


def test_two_choices_by_hand():
    even = torch.zeros(1, 2), torch.tensor([[0.0, math.log(3)]])
    dist = heads.Factored((heads.Categorical(even[0]), heads.Categorical(even[1])))
    score = dist.log_prob((torch.tensor([0]), torch.tensor([1])))
    torch.testing.assert_close(score, torch.tensor([math.log(1 / 2 * 3 / 4)]))
    entropy = math.log(2) - 0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    torch.testing.assert_close(dist.entropy(), torch.tensor([entropy]))


@pytest.mark.parametrize("given, words", [
    ({"a": torch.zeros(6)}, "a dict with 'a', expected a dict with 'a', 'b'"),
    (torch.zeros(6), "a Tensor, expected a dict"),
    ({"a": torch.zeros(6), "b": (torch.zeros(6, 2),)}, "a tuple, expected a tuple of 2"),
    ({"a": (torch.zeros(6),), "b": (torch.zeros(6, 2), torch.zeros(6, 2))}, "a tuple, expected one tensor"),
])  # fmt: skip
def test_an_action_that_is_nested_otherwise_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        factored()[0].log_prob(given)


def test_correlated_noise_reaches_normal_distributions_of_torch_and_no_other():
    noise, normal = torch.randn(6, 2), td.Independent(td.Normal(torch.randn(6, 2), torch.ones(6, 2)), 1)
    drawn = heads.draw_action(heads.Factored((normal, td.Categorical(torch.ones(6, 3)))), noise)
    torch.testing.assert_close(drawn[0], normal.mean + noise)
    beta = td.Independent(td.Beta(torch.ones(6, 2), torch.ones(6, 2)), 1)
    assert heads.draw_action(heads.Factored((beta,)), noise)[0].shape == (6, 2)


def test_correlated_noise_reaches_the_numbers_alone():
    dist, _ = factored()
    noise = torch.randn(6, 2)
    torch.manual_seed(5)
    first = heads.draw_action(dist, noise)
    torch.manual_seed(6)
    second = heads.draw_action(dist, noise)
    gaussian = dist.parts["b"][0]
    assert torch.equal(first["b"][0], gaussian.mean + gaussian.log_std.exp() * noise)
    assert torch.equal(first["b"][0], second["b"][0]) and not torch.equal(first["b"][1], second["b"][1])


# --- masks ---------------------------------------------------------------------------------------------------------------

SPACE = spaces.Dict({"tool": spaces.Discrete(3), "where": spaces.Box(0, 1), "deep": spaces.Tuple([
    spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2)])})  # fmt: skip
SIZES = mask_sizes(SPACE)
TOOL, HEADS, BITS = [1, 0, 1], [1, 1, 0, 1], [0, 1]
ORDER = list(SPACE)  # gymnasium sorts the keys: deep, tool, where
FLAT = [*HEADS, *BITS, *TOOL]


def test_a_mask_has_the_parts_side_by_side_in_the_order_of_the_space():
    assert ORDER == ["deep", "tool", "where"] and leaves(SIZES) == [4, 2, 3, 0]
    mask = {"tool": np.array(TOOL), "where": None, "deep": (np.array(HEADS), np.array(BITS))}
    assert joined_mask(mask, SIZES).tolist() == [bool(x) for x in FLAT]
    parts = split_mask(joined_mask(mask, SIZES), SIZES)
    assert [None if p is None else p.int().tolist() for p in parts] == [HEADS, BITS, TOOL, None]


@pytest.mark.parametrize("mask, flat", [
    (None, None),
    ({"tool": None}, None),
    ({"tool": TOOL}, [1] * 6 + TOOL),
    ({"deep": (([1, 1], [0, 1]), None)}, [*HEADS, 1, 1, 1, 1, 1]),
    ({"deep": (None, BITS), "tool": torch.tensor(TOOL)}, [1] * 4 + BITS + TOOL),
    (np.array(FLAT), FLAT),
    (torch.tensor(FLAT).bool(), FLAT),
])  # fmt: skip
def test_parts_that_are_left_out_are_free(mask, flat):
    joined = joined_mask(mask, SIZES)
    assert (joined if flat is None else joined.int().tolist()) == flat


def test_masks_of_many_rows_come_as_arrays_as_rows_and_as_gymnasium_batches_infos():
    rows = [{"tool": np.array([0, 1, 1])}, None, {"deep": (np.array(HEADS), None)}]
    want = [[1] * 6 + [0, 1, 1], [1] * 9, HEADS + [1] * 5]
    assert joined_mask(rows, SIZES).int().tolist() == want
    tuples = np.empty(3, object)
    tuples[2] = np.array(HEADS), None
    info = {"tool": np.array([[0, 1, 1], [0, 0, 0], [0, 0, 0]]), "_tool": np.array([True, False, False]),
            "deep": tuples, "_deep": np.array([False, False, True])}  # fmt: skip
    assert joined_mask(info, SIZES).int().tolist() == want
    segment = {"tool": torch.ones(5, 3, 3).bool()}  # [T, B, n]
    assert joined_mask(segment, SIZES).shape == (5, 3, 9)


@pytest.mark.parametrize("mask, words", [
    ({"tols": TOOL}, r"a dict of \['tols'\], expected {'deep'.*None where all is allowed"),
    ((TOOL,), "a tuple of 1, expected {'deep'"),
    ({"deep": (HEADS,)}, "a tuple of 1, expected"),
    ({"tool": [1, 1]}, r"of 'tool' has shape \(2,\), expected \(3,\)"),
    ({"tool": TOOL, "where": [1]}, "a Box takes no mask"),
    ({"tool": {"x": TOOL}}, r"a dict of \['x'\], expected \[3\]"),
])  # fmt: skip
def test_a_mask_of_another_form_says_which_one_is_expected(mask, words):
    with pytest.raises(ValueError, match=words):
        joined_mask(mask, SIZES)


# --- policies --------------------------------------------------------------------------------------------------------------


def make_policy(kind, core="gru", **options):
    torch.manual_seed(2)
    policy = hf.ActorCritic(OBS, SPACES[kind], core, 8, **options)
    torch.nn.init.normal_(policy.actor.weight)
    return policy


@pytest.mark.parametrize("options", [{}, {"scale_actions": True}, {"squash_actions": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_what_act_gives_evaluate_repeats(kind, options):
    policy = make_policy(kind, **options)
    obs, steps = torch.randn(6, 3, 3), []
    start = policy.initial_state(3)
    mask = nested(kind, torch.tensor([[True, False, True]] * 3), None, torch.tensor([[False, True]] * 3))
    steps = [policy.act(obs[t], torch.full((3,), t in (0, 4)), action_mask=mask) for t in range(6)]
    actions = tree_map(lambda *x: torch.stack(x), *[step.action for step in steps])
    resets = torch.tensor([t in (0, 4) for t in range(6)])[:, None].expand(6, 3)
    masks = tree_map(lambda m: None if m is None else m.expand(6, *m.shape), mask)
    new = policy.evaluate(obs, actions, start, resets, action_mask=masks)
    torch.testing.assert_close(new.log_prob, torch.stack([s.log_prob for s in steps]), rtol=0, atol=1e-5)
    played = {int(tool) for tool in leaves(actions)[-1 if kind == "dict" else 0].flatten()}
    assert played == {1, 3}, "Discrete(3, start=1) without its second choice"
    if options:
        place = leaves(actions)[1]
        assert place.abs().max() <= 2.0 or "squash_actions" not in options


def test_the_box_parts_have_their_own_bounds_and_deviations():
    space = spaces.Dict({"a": spaces.Box(0.0, 4.0, (1,)), "b": spaces.Discrete(2), "c": spaces.Box(-1.0, 1.0, (2,))})
    policy = hf.ActorCritic(OBS, space, "gru", 8, scale_actions=True)
    with torch.no_grad():
        policy.actor.weight.zero_()
        policy.actor.bias.copy_(torch.tensor([0.5, 0.0, 0.0, 0.1, 0.2]))
        policy.log_std.copy_(torch.tensor([0.5, 1.0, 2.0]).log())
    dist = policy.step(torch.zeros(1, 3), policy.initial_state(1)).dist
    torch.testing.assert_close(dist.mode["a"], torch.tensor([[3.0]]))
    torch.testing.assert_close(dist.mode["c"], torch.tensor([[0.1, 0.2]]))
    torch.testing.assert_close(dist.deviation, torch.tensor([[0.5, 1.0, 2.0]]))
    torch.testing.assert_close(dist.parts["a"].log_std.exp(), torch.tensor([[1.0]]))  # half of the range of 4
    torch.testing.assert_close(dist.parts["c"].log_std.exp(), torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize("kind", KINDS)
def test_predict_gives_what_the_environment_takes(kind):
    policy = make_policy(kind, scale_actions=True, initial_std=5.0)
    one, _ = policy.predict(np.zeros(3, np.float32), action_masks=nested(kind, [1, 0, 0], None, None))
    assert SPACES[kind].contains(one)
    several, _ = policy.predict(np.zeros((4, 3), np.float32))
    assert [x.shape for x in leaves(several)] == [(4, *np.shape(x)) for x in leaves(one)]
    tool = one["tool"] if kind == "dict" else one[0]
    assert tool == 1


def test_the_doctor_finds_nothing_in_such_a_policy():
    seen = spaces.Dict({"obs": OBS, "prev_action": SPACES["tuple"], "prev_reward": spaces.Box(-9, 9, ())})
    torch.manual_seed(1)
    policy = hf.ActorCritic(seen, SPACES["tuple"], "gru", 8)
    assert hf.doctor.examine(policy).findings == ()
    masks = Holdfast(policy, action_masks=True).action_masks(50, torch.Generator().manual_seed(0))
    assert masks.shape == (50, 5) and masks[:, :3].any(1).all() and not masks.all(0).any()


@pytest.mark.parametrize("make", [hf.SoftActorCritic, hf.QNetwork])
def test_methods_that_need_one_kind_of_action_say_what_to_use(make):
    with pytest.raises(ValueError, match="use --algorithm ppo"):
        make(OBS, SPACES["dict"])
