"""`ActorCritic` from gymnasium spaces: every observation and action space, both legs, masks, critics, numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast as hf
from holdfast.policies import encoders
from holdfast.state import leaves, tree_map

BOX = spaces.Box(-1, 1, (3,))
OBSERVATIONS = {
    "box": BOX,
    "scalar box": spaces.Box(-1, 1, ()),
    "matrix": spaces.Box(-1, 1, (2, 3)),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "discrete": spaces.Discrete(4),
    "discrete from 3": spaces.Discrete(4, start=3),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(4),
    "image": spaces.Box(0, 255, (3, 12, 12), np.uint8),
    "image, channels last": spaces.Box(0, 255, (40, 36, 1), np.uint8),
    "tiny image": spaces.Box(0, 255, (1, 3, 3), np.uint8),
    "dict": spaces.Dict({"a.b": BOX, "keys": spaces.Discrete(3)}),
    "nested": spaces.Dict(
        {"in": spaces.Dict({"x": BOX, "m": spaces.MultiBinary(2)}), "t": spaces.Tuple([BOX, spaces.Discrete(2)])}
    ),
}
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "discrete from -1": spaces.Discrete(3, start=-1),
    "multidiscrete": spaces.MultiDiscrete([3, 2, 4]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,)),
    "matrix": spaces.Box(-1, 1, (2, 2)),
}


def batch(space, T, B, seed=0):
    """[T, B, ...] samples as numpy, nested as the space is."""
    space.seed(seed)
    samples = [[space.sample() for _ in range(B)] for _ in range(T)]
    return stack([stack(row) for row in samples])


def stack(items):
    if isinstance(items[0], dict):
        return {k: stack([i[k] for i in items]) for k in items[0]}
    if isinstance(items[0], tuple):
        return tuple(stack([i[k] for i in items]) for k in range(len(items[0])))
    return np.stack(items)


def row(obs, t):
    return tree_map(lambda o: None if o is None else o[t], obs)


def policy(observation=BOX, action=ACTIONS["discrete"], **options):
    torch.manual_seed(0)
    return hf.ActorCritic(observation, action, hidden_size=8, **options)


def roll_and_replay(p, obs, resets, masks=None):
    """Numpy rollout, then the training leg on it: both legs' log-probs and values."""
    start, steps = p.memory.read(range(resets.shape[1])), []
    for t in range(len(resets)):
        mask = None if masks is None else row(masks, t)
        steps.append(p.act(row(obs, t), resets[t], action_mask=mask))
    actions = np.stack([s.action for s in steps])
    ev = p.evaluate(obs, actions, start, resets, action_mask=masks)
    return ev, np.stack([s.log_prob for s in steps]), np.stack([s.value for s in steps]), actions


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("core", ["lstm", "gru", None])
def test_every_observation_space_in_numpy_and_both_legs_agree(observation, core):
    p = policy(OBSERVATIONS[observation], core=core)
    obs, resets = batch(OBSERVATIONS[observation], 4, 3), np.array([[True, False, False]] * 2 + [[False] * 3] * 2)
    ev, log_prob, value, _ = roll_and_replay(p, obs, resets)
    assert isinstance(log_prob, np.ndarray) and value.shape == (4, 3)
    np.testing.assert_allclose(ev.log_prob.detach(), log_prob, atol=1e-5)
    np.testing.assert_allclose(ev.value.detach(), value, atol=1e-5)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_space_gives_actions_of_the_space_and_both_legs_agree(action):
    space = ACTIONS[action]
    p = policy(action=space)
    ev, log_prob, value, actions = roll_and_replay(p, batch(BOX, 5, 3), np.zeros((5, 3), bool))
    if not isinstance(space, spaces.Box):  # Box actions are raw, the clipped one goes to the environment
        assert all(space.contains(a.astype(space.dtype)) for a in actions.reshape(15, *actions.shape[2:]))
    assert actions.shape[2:] == space.shape
    np.testing.assert_allclose(ev.log_prob.detach(), log_prob, atol=1e-5)
    np.testing.assert_allclose(ev.value.detach(), value, atol=1e-5)
    ev.log_prob.sum().backward()
    assert ev.entropy.shape == (5, 3)


def masks_for(action, T, B):
    generator = np.random.default_rng(0)
    if action == "dependent":
        one, two = generator.random((T, B, 3)) < 0.6, generator.random((T, B, 3, 2)) < 0.6
        one[..., 0] = two[..., 0] = True
        return (one, two, None)
    width = {"discrete": 4, "multidiscrete": 9, "multibinary": 3}[action]
    mask = generator.random((T, B, width)) < 0.6
    mask[..., {"discrete": [0], "multidiscrete": [0, 3, 5], "multibinary": []}[action]] = True
    return mask


@pytest.mark.parametrize("action", ["discrete", "multidiscrete", "multibinary", "dependent"])
@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_masked_actions_with_memory_replay_and_forbidden_ones_never_come(action, core):
    space = ACTIONS["multidiscrete" if action == "dependent" else action]
    p = policy(action=space, core=core)
    T, B = 6, 3
    masks = masks_for(action, T, B)
    resets = np.random.default_rng(1).random((T, B)) < 0.3
    ev, log_prob, value, actions = roll_and_replay(p, batch(BOX, T, B), resets, masks)
    assert np.isfinite(log_prob).all()
    np.testing.assert_allclose(ev.log_prob.detach(), log_prob, atol=1e-5)
    np.testing.assert_allclose(ev.value.detach(), value, atol=1e-5)
    if action == "discrete":
        assert np.take_along_axis(masks, actions[..., None], -1).all()
    if action == "multibinary":
        assert not (actions.astype(bool) & ~masks).any()
    ev.log_prob.sum().backward()
    assert all(torch.isfinite(q.grad).all() for q in p.parameters() if q.grad is not None)


def test_integer_masks_from_numpy_are_taken_and_box_actions_take_none():
    p = policy()
    mask = np.array([[1, 0, 0, 0], [0, 0, 0, 1]], dtype=np.int8)
    assert p.act(batch(BOX, 1, 2)[0], action_mask=mask).action.tolist() == [0, 3]
    with pytest.raises(ValueError, match="Box actions take no action mask"):
        policy(action=ACTIONS["box"]).act(batch(BOX, 1, 2)[0], action_mask=mask)


def test_a_mask_that_forbids_everything_is_refused_and_memory_is_unchanged():
    p = policy()
    obs = batch(BOX, 2, 2)
    p.act(obs[0])
    before = p.get_memory()
    with pytest.raises(ValueError, match="forbids every action in row 1"):
        p.act(obs[1], action_mask=np.array([[True] * 4, [False] * 4]))
    after = p.get_memory()
    assert all(torch.equal(a, b) for a, b in zip(before["leaves"], after["leaves"]))


@pytest.mark.parametrize("critic_core", ["shared", "separate", "none"])
@pytest.mark.parametrize("core", ["lstm", "gru", None])
def test_the_critic_can_share_the_core_have_its_own_or_have_none(critic_core, core):
    p = policy(core=core, critic_core=critic_core)
    obs = torch.randn(1, 2, 3).expand(3, 2, 3)
    values = torch.stack([p.act(obs[t]).value for t in range(3)])
    has_memory = core is not None and critic_core != "none"
    assert torch.equal(values[0], values[2]) != has_memory
    assert p.has_memory() == (core is not None)
    ev = p.evaluate(obs, torch.zeros(3, 2, dtype=torch.long), p.initial_state(2), None)
    ev.value.sum().backward()
    actor = p.core.cores["actor"] if critic_core != "shared" else None
    if actor is not None:
        assert all(q.grad is None or q.grad.abs().sum() == 0 for q in actor.parameters()), "the critic trains the actor"


def test_a_core_of_ones_own_is_taken_and_checked():
    core = hf.Stack([hf.LSTM(8, 8), hf.GRU(8, 5)], residual=True)
    assert policy(core=core).act(torch.randn(2, 3)).value.shape == (2,)
    with pytest.raises(ValueError, match="takes 7 features, the encoder gives 8"):
        policy(core=hf.GRU(7, 4))
    with pytest.raises(ValueError, match="unknown core 'lstmm'"):
        policy(core="lstmm")
    with pytest.raises(ValueError, match="unknown critic_core 'both'"):
        policy(critic_core="both")
    with pytest.raises(ValueError, match=r"hf\.Parallel"):
        policy(core=hf.GRU(8, 4), critic_core="separate")
    with pytest.raises(ValueError, match="unknown activation"):
        policy(activation="sine")


class Sentences(spaces.Space):
    """Text in a space of its own, as MiniGrid's missions are."""


def test_spaces_that_cannot_be_served_say_so():
    with pytest.raises(ValueError, match="observations of Text cannot be stored"):
        policy(spaces.Dict(a=BOX, b=spaces.Tuple([spaces.Text(5)])))
    with pytest.raises(ValueError, match="observations of Sentences cannot be stored"):
        policy(Sentences(dtype=str))
    with pytest.raises(ValueError, match="no action head for"):
        policy(action=spaces.Tuple([BOX, spaces.Text(5)]))
    with pytest.raises(ValueError, match="start at 0"):
        policy(action=spaces.MultiDiscrete([2, 2], start=[1, 0]))


@pytest.mark.parametrize("space", ["box", "image", "discrete", "multidiscrete", "dict"])
def test_observations_of_another_shape_are_never_reshaped_into_environments(space):
    p = policy(OBSERVATIONS[space])
    sequence = batch(OBSERVATIONS[space], 4, 1)  # [T=4, B=1, ...] could pass for 4 environments
    with pytest.raises(ValueError, match="expected"):
        p.act(sequence)
    assert p.memory.num_envs == 0


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e30])
def test_observations_of_any_size_are_normalized_alike(size: float):
    space = spaces.Box(-np.inf, np.inf, (3,))
    obs = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.1]) + 0.3
    usual, other = (encoders.for_space(space, normalize=True) for _ in range(2))
    for part in (obs[:50], obs[50:]):
        usual.update(part)
        other.update(part * size)
    torch.testing.assert_close(other(obs * size), usual(obs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(usual(obs).var(0, unbiased=False), torch.ones(3), rtol=1e-4, atol=0)
    loaded = encoders.for_space(space, normalize=True)
    loaded.load_state_dict(other.state_dict())
    assert torch.equal(loaded(obs * size), other(obs * size))


def test_a_constant_observation_is_normalized_to_about_zero():
    encoder = encoders.for_space(spaces.Box(-9, 9, (2,)), normalize=True)
    constant = torch.tensor([[0.1, 0.0]]).expand(300, 2)
    for _ in range(5):
        encoder.update(constant)
    assert float(encoder(constant).abs().max()) < 0.1


def test_normalization_moves_only_when_told_and_is_in_the_state_dict():
    p = policy(spaces.Dict({"a": spaces.Box(-9, 9, (2,)), "b": spaces.Discrete(2)}), normalize_obs=True)
    data = {"a": torch.randn(50, 4, 2) * 3 + 5, "b": torch.zeros(50, 4, dtype=torch.long)}
    first = p.act(row(data, 0), deterministic=True)
    assert torch.equal(p.act(row(data, 0), env_ids=range(4, 8), deterministic=True).value, first.value)
    p.update_normalizer({k: v[:20] for k, v in data.items()})
    p.update_normalizer({k: v[20:] for k, v in data.items()})
    encoder = p.encoder.parts[0]
    torch.testing.assert_close(encoder.mean, data["a"].double().flatten(0, 1).mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        encoder.var, data["a"].double().flatten(0, 1).var(0, unbiased=False), rtol=1e-3, atol=1e-3
    )
    other = policy(p.observation_space, normalize_obs=True)
    other.load_state_dict(p.state_dict())
    assert torch.equal(
        other.act(row(data, 1), deterministic=True).value,
        p.act(row(data, 1), env_ids=range(8, 12), deterministic=True).value,
    )


def test_observations_of_booleans_are_normalized_as_numbers_are():
    bits, numbers = spaces.Box(0, 1, (3,), bool), spaces.Box(0, 1, (3,), np.float32)
    obs = np.array([[True, False, True], [False, False, True]])
    values = [policy(space, normalize_obs=True).act(obs.astype(space.dtype)).value for space in (bits, numbers)]
    np.testing.assert_array_equal(*values)


def test_predict_is_stable_baselines_interface():
    p = policy(action=ACTIONS["box"])
    obs, state, start = batch(BOX, 3, 2), None, np.ones(2, bool)
    values = []
    for t in range(3):
        action, state = p.predict(obs[t], state, start, deterministic=True)
        start = np.zeros(2, bool)
        assert isinstance(action, np.ndarray) and all(isinstance(leaf, np.ndarray) for leaf in leaves(state))
        values.append(action)
    expected = [p.act(obs[t], deterministic=True).action for t in range(3)]
    np.testing.assert_allclose(np.stack(values), np.stack(expected), atol=1e-6)
    again, _ = p.predict(obs[0], state, np.ones(2, bool), deterministic=True)
    np.testing.assert_allclose(again, values[0], atol=1e-6)
    single, single_state = p.predict(obs[0, 0], None, np.array([True]), deterministic=True)
    np.testing.assert_allclose(single, values[0][0], atol=1e-6)
    assert p.predict(obs[1, 0], single_state, deterministic=True)[0].shape == (2,)


def test_numbers_with_different_ranges_are_one_hot_vectors_side_by_side():
    encoder = encoders.for_space(spaces.MultiDiscrete([2, 4, 3], start=[0, 5, -1]))
    x = torch.tensor([[1, 5, 1], [0, 8, -1]])
    assert encoder(x).tolist() == [[0, 1, 1, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1, 1, 0, 0]]
    assert torch.equal(
        encoder(x), torch.cat([F.one_hot(x[:, i] - s, n) for i, s, n in ((0, 0, 2), (1, 5, 4), (2, -1, 3))], 1)
    )
    for outside in ([2, 5, 0], [-1, 5, 0], [0, 4, 0], [0, 9, 0], [0, 5, 2]):
        with pytest.raises(ValueError, match="outside its space"):
            encoder(torch.tensor([outside]))


def test_a_number_with_another_range_costs_no_operation_per_number():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **kwargs or {})

    calls = []
    for numbers in (10, 1000):
        encoder = encoders.for_space(spaces.MultiDiscrete([3] * (numbers - 1) + [4]))
        with Count() as count:
            encoder(torch.zeros(5, numbers, dtype=torch.int64))
        calls.append(count.calls)
    assert calls[0] == calls[1] < 30


def test_predict_takes_masks_and_never_chooses_what_they_forbid():
    p = policy(action=spaces.MultiDiscrete([3, 4]))
    obs = batch(BOX, 1, 64)[0]
    mask = np.random.default_rng(1).random((64, 7)) < 0.4
    mask[:, 2] = mask[:, 5] = True  # something is allowed in each head
    heads = [mask[:, :3], mask[:, 3:]]
    for given in mask, heads, mask.astype(np.int8):
        for deterministic in False, True:
            action, _ = p.predict(obs, deterministic=deterministic, action_masks=given)
            assert all(head[np.arange(64), action[:, i]].all() for i, head in enumerate(heads))
    for given in mask[0], [head[0] for head in heads]:
        single, _ = p.predict(obs[0], deterministic=True, action_masks=given)
        np.testing.assert_array_equal(single, action[0])
    free, _ = p.predict(obs)
    assert not all(head[np.arange(64), free[:, i]].all() for i, head in enumerate(heads)), "masks made the difference"


def test_numpy_in_numpy_out_also_in_half_precision():
    p = policy().bfloat16()
    obs = batch(BOX, 2, 2)
    step = p.act(obs[0])
    assert step.value.dtype == np.float32 and isinstance(p.peek_value(obs[1]), np.ndarray)
    _, state = p.predict(obs[0])
    action, _ = p.predict(obs[1], state)
    assert action.shape == (2,)


def test_tensors_in_tensors_out_and_wrong_dtypes_are_converted_at_the_encoder():
    p = policy()
    assert isinstance(p.act(torch.randn(2, 3)).value, torch.Tensor)
    assert p.act(torch.randn(2, 3, dtype=torch.float64)).value.dtype == torch.float32


def test_statistics_of_observations_move_in_place_where_a_captured_graph_reads_them():
    box = spaces.Box(-np.inf, np.inf, (3,), dtype=np.float32)
    policy = hf.ActorCritic(box, spaces.Discrete(2), hidden_size=4, normalize_obs=True)
    held = {name: buffer for name, buffer in policy.named_buffers()}
    policy.update_normalizer(torch.randn(50, 3) * 4 + 1)
    assert held and all(buffer is held[name] for name, buffer in policy.named_buffers())
    assert float(held["encoder.var"].min()) > 4


@pytest.mark.filterwarnings("error")
def test_a_rollout_of_dummy_steps_alone_leaves_the_statistics_as_they_were():
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), "gru", 4, normalize_obs=True)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.update_normalizer(torch.empty(0, 3))
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (spaces.Discrete(3), [(4, 2, 1)]),
        (spaces.MultiDiscrete([2, 3]), [(4, 2), (4, 2, 1), (4, 2, 3)]),
        (spaces.MultiBinary(3), [(4, 2), (4, 2, 1), (4, 2, 2)]),
        (spaces.Box(-1, 1, (2,)), [(4, 2), (4, 2, 1), (4, 2, 3), (4, 2, 2, 1)]),
    ],
    ids=str,
)
def test_actions_of_another_shape_are_refused_and_never_broadcast(space: Any, wrong: list[tuple[int, ...]]):
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,)), space, "gru", hidden_size=4)
    obs, resets = torch.zeros(4, 2, 3), torch.ones(4, 2, dtype=torch.bool)
    dtype = torch.float32 if isinstance(space, spaces.Box) else torch.int64
    assert policy.evaluate(obs, torch.zeros(4, 2, *space.shape, dtype=dtype), None, resets).log_prob.shape == (4, 2)
    for shape in wrong:
        with pytest.raises(ValueError, match="one row per step and environment"):
            policy.evaluate(obs, torch.zeros(shape, dtype=dtype), None, resets)


def test_predict_gives_actions_that_the_environment_takes_as_runner_does():
    low, high = np.array([-0.2, 1.0, -np.inf]), np.array([1.0, 3.0, np.inf])
    p = hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Box(low, high, dtype=np.float64), "gru", 8)
    with torch.no_grad():
        p.actor.bias.fill_(9.0)  # all beyond the upper bound
    obs = np.zeros((5, 3), np.float32)
    for deterministic in True, False:
        torch.manual_seed(0)
        action, _ = p.predict(obs, deterministic=deterministic)
        assert action.dtype == np.float64 and all(p.action_space.contains(row) for row in action)
        torch.manual_seed(0)
        np.testing.assert_array_equal(action, hf.Runner(p).act(obs, deterministic=deterministic).action)
    assert (action[:, 2] > 3).all(), "no bound, nothing clipped"


def test_squashed_actions_without_bounds_are_refused_by_their_index():
    space = spaces.Box(np.array([-1, -np.inf, 0], np.float32), np.array([1, np.inf, np.inf], np.float32))
    with pytest.raises(ValueError, match=r"two bounds for every action.*at index 1, 2; give it bounds, or"):
        hf.ActorCritic(spaces.Box(-1, 1, (3,)), space, "gru", 8, squash_actions=True)


@pytest.mark.parametrize(
    "obs, said",
    [
        ([{"a": np.zeros(2, np.float32)}] * 3, "observations came as a list, expected a dict with 'a', each an array"),
        ({"a": [[0.0, 0.0]]}, "observations hold a float outside of any array, expected arrays or tensors"),
    ],
)
def test_observations_in_lists_are_refused_in_words(obs: Any, said: str):
    p = hf.ActorCritic(spaces.Dict(a=spaces.Box(-1, 1, (2,))), spaces.Discrete(2), "gru", 8)
    with pytest.raises(TypeError, match=said):
        p.act(obs)


def test_an_observation_without_what_is_fed_back_is_refused_in_words():
    seen = spaces.Dict(obs=spaces.Box(-1, 1, (2,)), prev_action=spaces.Discrete(2), prev_reward=spaces.Box(-9, 9, ()))
    p = hf.ActorCritic(seen, spaces.Discrete(2), "gru", 8)
    for call in p.act, p.predict:
        with pytest.raises(
            TypeError, match=r"as a Tensor, expected a dict with 'obs', 'prev_action', .* hf.Runner, and hf.collect"
        ):
            call(np.zeros((3, 2), np.float32))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(hidden_size=-1), "hidden_size must be a positive integer, got -1"),
        (dict(num_layers=0), "num_layers must be a positive integer, got 0"),
        (dict(head_sizes=(8, 0)), "each of encoder_sizes and head_sizes must be a positive integer, got 0"),
    ],
)
def test_sizes_that_no_layer_can_have_are_refused_by_name(sizes, words):
    with pytest.raises(ValueError, match=words):
        hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), **sizes)
