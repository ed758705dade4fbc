"""`RecurrentPolicy`: what users write, what they get back, and what is refused before anything changes."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal

import holdfast as hf
from accumulator import DTYPES, Accumulator, dtypes
from conformance.policies import ConvPolicy, actor_critic, loud
from holdfast import state as state_ops

BOX, DISCRETE = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(4)


class Small(hf.RecurrentPolicy):
    def __init__(self, core=None):
        super().__init__(core=core or hf.LSTM(4, 5))
        self.inner, self.actor, self.critic = nn.Linear(3, 4), nn.Linear(5, 2), nn.Linear(5, 1)

    def encode(self, obs):
        return self.inner(obs)

    def decode(self, features):
        return Categorical(logits=self.actor(features)), self.critic(features)


class Eyes(Small):
    def encode(self, obs):
        return self.inner(obs["eyes"])


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return Small()


def same_memory(one, other):
    keys = ("known", "fresh")
    return all(torch.equal(one[k], other[k]) for k in keys) and all(
        torch.equal(a, b) for a, b in zip(one["leaves"], other["leaves"])
    )


def test_a_policy_is_an_encoder_and_a_decoder(policy):
    step = policy.act(torch.randn(2, 3))
    assert step.action.shape == step.log_prob.shape == step.value.shape == (2,)  # a value [N, 1] is taken too
    ev = policy.evaluate(torch.randn(4, 2, 3), torch.zeros(4, 2), policy.initial_state(2), None, return_state=True)
    assert ev.log_prob.shape == ev.entropy.shape == ev.value.shape == (4, 2)
    assert ev.state["h"].shape == (2, 1, 5)
    starts = torch.ones(4, 2, dtype=torch.bool)
    assert policy.evaluate(torch.randn(4, 2, 3), torch.zeros(4, 2), None, starts).state is None


class SuperTooLate(Small):
    def __init__(self):
        self.inner = nn.Linear(3, 4)
        super().__init__()


def test_a_policy_that_begins_without_super_is_told_what_to_write():
    with pytest.raises(
        TypeError, match=r"SuperTooLate.* sets inner too early; write super\(\)\.__init__\(core=.*first"
    ):
        SuperTooLate()


def test_an_encoder_for_other_observations_is_named_with_the_shape_it_got(policy):
    words = r"Small\.encode failed on observations of shape \[2, 5\], .*mat1 and mat2 shapes .* observation_space"
    with pytest.raises(ValueError, match=words) as refused:
        policy.act(torch.randn(2, 5))
    assert isinstance(refused.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match=r"encode failed on observations of shape \{'eyes': \[2, 5\]\}"):
        Eyes().act({"eyes": torch.randn(2, 5)})


def test_forward_is_evaluate(policy):
    args = torch.randn(4, 2, 3), torch.zeros(4, 2), policy.initial_state(2), None
    assert torch.equal(policy(*args).value, policy.evaluate(*args).value)


def test_peeking_at_a_value_is_the_next_value_and_leaves_memory_as_it_was(policy):
    obs = torch.randn(3, 3, 3)
    policy.act(obs[0])
    before = policy.get_memory()
    resets = torch.tensor([True, False, False])
    peeked, after_reset = policy.peek_value(obs[1]), policy.peek_value(obs[1], resets=resets)
    few = policy.peek_value(obs[1, [2, 0]], env_ids=[2, 0])
    new = policy.peek_value(obs[1, :1], env_ids=[9])
    assert same_memory(policy.get_memory(), before) and policy.memory.num_envs == 3
    assert torch.equal(new, Small.peek_value(copy.deepcopy(policy), obs[1, :1], memory=hf.Memory(policy.core)))
    assert torch.equal(few, peeked[[2, 0]])
    assert not torch.equal(peeked[0], after_reset[0]) and torch.equal(peeked[1:], after_reset[1:])
    assert torch.equal(policy.act(obs[1]).value, peeked)


def test_peeking_at_more_environments_than_known_sees_fresh_ones(policy):
    policy.act(torch.randn(2, 3))
    obs = torch.randn(4, 3)
    fresh = policy.peek_value(obs, memory=hf.Memory(policy.core))
    assert torch.equal(policy.peek_value(obs)[2:], fresh[2:]) and policy.memory.num_envs == 2


def test_a_second_memory_is_another_set_of_environments(policy):
    obs = torch.randn(3, 2, 3)
    training = [policy.act(obs[0]).value]
    evaluation = hf.Memory(policy.core)
    first = policy.act(obs[0, :1], memory=evaluation).value
    training.append(policy.act(obs[1]).value)
    assert torch.equal(first, training[0][:1]) and evaluation.num_envs == 1 and policy.memory.num_envs == 2
    assert not torch.equal(training[1], policy.act(obs[1], memory=hf.Memory(policy.core)).value)


def test_threads_with_a_memory_each_do_not_disturb_each_other(policy):
    obs = torch.randn(2, 40, 3, 3)
    expected = []
    for k in range(2):
        memory = hf.Memory(policy.core)
        expected.append(torch.stack([policy.act(o, memory=memory).value for o in obs[k]]))
    got = [None, None]

    def run(k):
        memory = hf.Memory(policy.core)
        got[k] = torch.stack([policy.act(o, memory=memory).value for o in obs[k]])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_the_memory_interface_is_one_line_each(policy):
    assert policy.has_memory() and not hf.RecurrentPolicy(hf.Memoryless(4)).has_memory()
    policy.act(torch.randn(3, 3))
    saved = policy.get_memory()
    policy.reset_env_memory(1)
    state = policy.memory.read()
    assert state["h"][1].abs().sum() == 0 and state["h"][0].abs().sum() > 0
    policy.reset_env_memory(np.int64(0))
    policy.reset_memory()
    assert all(leaf.abs().sum() == 0 for leaf in state_ops.leaves(policy.memory.read()))
    policy.set_memory(saved)
    assert same_memory(policy.get_memory(), saved)
    own = hf.Memory(policy.core)
    policy.set_memory(own)
    assert policy.memory is own
    with pytest.raises(ValueError, match="another core"):
        policy.set_memory(hf.Memory(hf.LSTM(4, 5)))
    with pytest.raises(TypeError, match="reset_memory"):
        policy.reset_env_memory(None)
    assert not policy.detach_state({"h": torch.ones(1, requires_grad=True) * 2})["h"].requires_grad


def test_a_copied_policy_has_its_own_memory(policy):
    policy.act(torch.randn(2, 3))
    other = copy.deepcopy(policy)
    assert other.memory.core is other.core
    before = policy.get_memory()
    other.act(torch.randn(2, 3))
    assert same_memory(policy.get_memory(), before)


BAD_STEPS = {
    "fewer rows": (lambda: {"obs": torch.randn(2, 3)}, ValueError, "got 2 rows, but this memory knows 3"),
    "ids of another length": (lambda: {"env_ids": [0, 1]}, ValueError, "got 3 observations with 2 env_ids"),
    "twice the same id": (lambda: {"env_ids": [0, 5, 5]}, ValueError, r"\[5\] more than once"),
    "negative id": (lambda: {"env_ids": [0, -4, 1]}, ValueError, "negative id -4"),
    "huge id": (lambda: {"env_ids": [0, 1, 2**64]}, TypeError, "expected integers"),
    "ids that are floats": (lambda: {"env_ids": torch.tensor([0.0, 1.0, 7.0])}, TypeError, "expected integers"),
    "int flags, new ids": (lambda: {"resets": torch.zeros(3).long(), "env_ids": [7, 8, 9]}, TypeError, "bool"),
    "flags too short, more rows": (
        lambda: {"obs": torch.randn(5, 3), "resets": [True]},
        ValueError,
        "resets has shape",
    ),
    "a mask for a decoder without": (
        lambda: {"action_mask": torch.ones(3, 2).bool()},
        ValueError,
        "takes no action_mask",
    ),
    "features": (lambda: {"obs": torch.randn(3, 4)}, ValueError, "shapes cannot be multiplied"),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_refused_step_leaves_memory_as_it_was(policy, case):
    build, error, words = BAD_STEPS[case]
    policy.act(torch.randn(3, 3))
    before = policy.get_memory()
    arguments = {"obs": torch.randn(3, 3), **build()}
    with pytest.raises(error, match=words):
        policy.act(**arguments)
    assert same_memory(policy.get_memory(), before) and policy.memory.num_envs == 3
    with pytest.raises(error):
        if "action_mask" in arguments:
            raise error
        policy.peek_value(**arguments)


def test_an_error_in_the_users_decoder_leaves_memory_as_it_was(policy):
    policy.act(torch.randn(3, 3))
    before = policy.get_memory()
    policy.critic = nn.Linear(7, 1)
    with pytest.raises(RuntimeError):
        policy.act(torch.randn(6, 3))
    assert same_memory(policy.get_memory(), before)


def test_a_segment_of_another_layout_is_refused(policy):
    T, B = 4, 2
    obs, actions, state = torch.randn(T, B, 3), torch.zeros(T, B), policy.initial_state(B)
    bad = {
        r"actions of shape \(2, 4\)": (obs, actions.t(), state, None),
        r"resets has shape \(2, 4\)": (obs, actions, state, torch.zeros(B, T, dtype=torch.bool)),
        "batch of 4": (obs.transpose(0, 1), actions.t(), state, None),
        r"observations are \[T, B": (torch.randn(3), actions, state, None),
        "does not fit": (obs, actions, hf.GRU(4, 5).initial_state(B), None),
    }
    for words, arguments in bad.items():
        with pytest.raises(ValueError, match=words):
            policy.evaluate(*arguments)


def test_a_mask_of_another_layout_is_refused():
    driver = actor_critic("lstm", "zero")
    obs, actions = driver.observations(4, 2), torch.zeros(4, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"an action mask of shape \(2, 4, 5\).*4 steps and 2 environments"):
        driver.policy.evaluate(obs, actions, driver.initial_state(2), None, action_mask=torch.ones(2, 4, 5).bool())


class WrongEncoder(Small):
    def encode(self, obs):
        return self.inner(obs)[:, :2]


class WrongValue(Small):
    def decode(self, features):
        return Categorical(logits=self.actor(features)), self.actor(features)


class UnwrappedNormal(Small):
    def decode(self, features):
        return Normal(self.actor(features), 1.0), self.critic(features)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WrongEncoder, r"encode returned \(2, 2\), expected .* \(2, 4\)"),
        (WrongValue, r"values of shape \(2, 2\), expected \(2,\)"),
        (UnwrappedNormal, r"log_prob of shape \(2, 2\), expected \(2,\).*Independent"),
    ],
)
def test_what_users_write_is_checked_by_shape_and_memory_is_unchanged(kind, words):
    p = kind()
    with pytest.raises(ValueError, match=words):
        p.act(torch.randn(2, 3))
    assert p.memory.num_envs == 0


def test_what_users_forget_is_named():
    with pytest.raises(TypeError, match=r"core must be a holdfast core.*Linear"):
        hf.RecurrentPolicy(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=r"write encode\(self, obs\)"):
        hf.RecurrentPolicy(hf.GRU(2, 2)).act(torch.zeros(1, 2))


def test_memory_saved_in_one_process_continues_bit_exact_in_another(tmp_path):
    driver = actor_critic("lstm", "learned")
    policy, obs = driver.policy, driver.observations(6, 3, seed=5)
    for t in range(3):
        policy.act(obs[t])
    policy.reset_env_memory(1)
    file = tmp_path / "saved.pt"
    torch.save({"weights": policy.state_dict(), "memory": policy.get_memory(), "obs": obs[3:]}, file)
    expected = torch.stack([policy.act(o, deterministic=True).value for o in obs[3:]])
    program = f"""
import sys, torch
sys.path[:0] = {[p for p in sys.path if p.endswith("tests")]!r}
torch.set_num_threads(1)
from conformance.policies import actor_critic
saved = torch.load({str(file)!r}, weights_only=True)
policy = actor_critic("lstm", "learned").policy
with torch.no_grad():
    for p in policy.parameters(): p.zero_()
policy.load_state_dict(saved["weights"])
policy.set_memory(saved["memory"])
torch.save(torch.stack([policy.act(o, deterministic=True).value for o in saved["obs"]]), {str(file)!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert torch.equal(torch.load(file, weights_only=True), expected)


def test_a_policy_written_by_a_user_takes_images():
    torch.manual_seed(0)
    p = loud(ConvPolicy(hf.GRU(6, 5)))
    assert p.act(np.zeros((2, 1, 2, 2), np.float32)).action.shape == (2,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predict_carries_leaves_of_several_dtypes_through_numpy(dtype):
    class Means(hf.RecurrentPolicy):
        def __init__(self):
            super().__init__(core=Accumulator(4))

        def encode(self, obs):
            return obs.to(self.core.weight.dtype)

        def decode(self, features):
            return Categorical(logits=features.float()), features.sum(-1)

    policy = Means().to(dtype)
    obs, state = np.random.default_rng(0).normal(size=(300, 2, 4)).astype(np.float32), None
    for t in range(300):
        state = policy.predict(obs[t], state, np.array([t == 7, False]))[1]
        policy.act(obs[t], np.array([t == 7, False]))
    assert state["age"].tolist() == [293, 300] and state["age"].dtype == np.int32
    stored = policy.memory.read()
    assert dtypes(stored) == {**DTYPES, "last": dtype}
    for name, leaf in stored.items():
        np.testing.assert_array_equal(leaf.float().numpy(), state[name])


# --- whose memory, and from where ---------------------------------------------------------------------------------------


def test_a_segment_without_its_start_state_is_refused_unless_every_row_begins_an_episode(policy):
    obs, actions, resets = torch.randn(4, 2, 3), torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.bool)
    for flags in (None, resets, resets.index_fill(0, torch.tensor([1]), True), torch.tensor([[True, False]] * 4)):
        with pytest.raises(ValueError, match=r"state is None.*segment\.start_state.*policy\.initial_state\(B\)"):
            policy.evaluate(obs, actions, None, flags)
        with pytest.raises(ValueError, match="state is None"):
            policy(obs, actions, None, flags)
    resets[0] = True
    fresh = policy.evaluate(obs, actions, policy.initial_state(2), resets)
    assert torch.equal(policy.evaluate(obs, actions, None, resets).value, fresh.value)
    compiled = torch.compile(policy.evaluate, fullgraph=True, backend="eager")
    assert compiled(obs, actions, None, resets).value.shape == (4, 2), "values are not read while compiling"


def test_a_policy_that_remembers_nothing_needs_no_start_state():
    control = hf.ActorCritic(BOX, DISCRETE, core=None)
    assert control.evaluate(torch.randn(4, 2, 3), torch.zeros(4, 2), None, None).value.shape == (4, 2)


def test_a_rollout_and_an_evaluation_that_share_the_policys_memory_are_noticed(policy):
    obs, first = torch.randn(2, 3), torch.ones(2, dtype=torch.bool)
    policy.act(obs, first)
    policy.eval()
    policy.act(obs, first)  # takes over: new episodes everywhere
    policy.act(obs)
    policy.train()
    with pytest.warns(UserWarning, match=r"last used in eval mode and is now used in train mode.*memory=hf\.Memory"):
        policy.act(obs)
    policy.eval()
    policy.reset_memory()
    policy.act(obs)  # fresh rows: nothing is mixed up
    policy.train()
    policy.act(obs, memory=hf.Memory(policy.core))
    policy.act(torch.randn(1, 3), env_ids=[5])  # ids say whose they are


class Logits(Small):
    def decode(self, features):
        return self.actor(features)


class NoValue(Small):
    def decode(self, features):
        return Categorical(logits=self.actor(features))


class NumberAsValue(Small):
    def decode(self, features):
        return Categorical(logits=self.actor(features)), 0.0


class LogitsAndValue(Small):
    def decode(self, features):
        return self.actor(features), self.critic(features)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Logits, r"returned a tensor of shape \(2, 2\), expected \(distribution, value\): wrap logits in"),
        (NoValue, r"returned a Categorical, expected \(distribution, value\)"),
        (LogitsAndValue, r"returned a tuple of Tensor, Tensor, expected \(distribution, value\)"),
        (NumberAsValue, r"returned a float as value, expected a tensor \[2\] or None"),
    ],
)
def test_what_decode_returns_is_checked(kind, words):
    with pytest.raises(TypeError, match=words):
        kind().act(torch.randn(2, 3))


# --- numbers that would be changed silently --------------------------------------------------------------------------


def test_fractions_are_refused_as_discrete_actions_and_observations():
    p = hf.ActorCritic(BOX, DISCRETE, hidden_size=8)
    obs, state = torch.randn(1, 2, 3), p.initial_state(2)
    whole, exact = (
        p.evaluate(obs, a, state, None).log_prob for a in (torch.tensor([[2.0, 0]]), torch.tensor([[2, 0]]))
    )
    assert torch.equal(whole, exact)
    for bad in (2.7, float("nan")):
        with pytest.raises(ValueError, match=r"discrete actions hold (2\.7|nan), expected whole numbers"):
            p.evaluate(obs, torch.tensor([[bad, 0.0]]), state, None)
    seen = hf.ActorCritic(DISCRETE, DISCRETE, hidden_size=8)
    with pytest.raises(ValueError, match=r"discrete observations hold 1\.5, expected whole numbers"):
        seen.act(torch.tensor([1.0, 1.5]))
    bits = hf.ActorCritic(BOX, gym.spaces.MultiBinary(2), hidden_size=8)
    with pytest.raises(ValueError, match=r"binary actions hold 0\.3"):
        bits.evaluate(obs, torch.tensor([[[1.0, 0.3], [0, 1]]]), state, None)


def test_masks_may_be_lists():
    p = hf.ActorCritic(BOX, DISCRETE, hidden_size=8)
    obs, flags = torch.randn(2, 3), [[True, False, False, False], [False, False, True, False]]
    for mask in (flags, [[1, 0, 0, 0], [0, 0, 1, 0]], tuple(map(tuple, flags)), np.array(flags), torch.tensor(flags)):
        assert p.act(obs, action_mask=mask).action.tolist() == [0, 2]
    for bad in (True, "all", [], [[True, "x"], [True, True]], {"a": 1}):
        with pytest.raises(TypeError, match=r"action_mask is .*expected bools \(True = allowed\)"):
            p.act(obs, action_mask=bad)
    several = hf.ActorCritic(BOX, gym.spaces.MultiDiscrete([2, 3]), hidden_size=8)
    heads = [[[True, False], [False, True]], [[False, False, True], [True, False, False]]]
    for mask in (heads, [torch.tensor(heads[0]), heads[1]], [a + b for a, b in zip(*heads)]):
        assert several.act(obs, action_mask=mask).action.tolist() == [[0, 2], [1, 0]]
