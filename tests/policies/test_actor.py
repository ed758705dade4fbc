"""`actor_only`: the same actions from the same weights, without critic, value or the critic's memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import holdfast as hf
from holdfast import state as state_ops

OBS = spaces.Dict(a=spaces.Box(-1, 1, (3,)), b=spaces.Discrete(4))
ACTIONS = {"discrete": spaces.Discrete(4), "box": spaces.Box(-1, 1, (2,))}
B = 3


def sliced_cores():
    """Actor and critic read different features of the trunk."""
    return hf.Parallel(actor=hf.LSTM(5, 6), critic=hf.GRU(6, 7), inputs={"actor": slice(3, 8), "critic": slice(0, 6)})


POLICIES = {
    "shared": lambda space: hf.ActorCritic(OBS, space, "lstm", 8),
    "separate": lambda space: hf.ActorCritic(OBS, space, "gru", 8, "separate", head_sizes=(5,)),
    "none": lambda space: hf.ActorCritic(OBS, space, "lstm", 8, "none"),
    "memoryless": lambda space: hf.ActorCritic(OBS, space, None, 8),
    "sliced": lambda space: hf.ActorCritic(OBS, space, sliced_cores(), encoder_sizes=(8,)),
}


def observations(seed, *batch):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.rand(*batch, 3, generator=g), "b": torch.randint(4, batch, generator=g)}


@pytest.fixture(params=POLICIES)
def policy(request):
    torch.manual_seed(0)
    return POLICIES[request.param](ACTIONS["discrete"])


@pytest.mark.parametrize("space", ACTIONS)
@pytest.mark.parametrize("kind", POLICIES)
def test_the_actor_acts_as_the_full_policy_and_has_no_value(kind, space):
    policy = POLICIES[kind](ACTIONS[space])
    actor = policy.actor_only()
    for t in range(5):
        obs, resets = observations(t, B), torch.rand(B) < 0.3
        full, alone = (p.act(obs, resets, deterministic=True) for p in (policy, actor))
        torch.testing.assert_close(alone.action, full.action)
        torch.testing.assert_close(alone.log_prob, full.log_prob)
        assert alone.value is None and full.value is not None
    assert actor.act({k: v.numpy() for k, v in obs.items()}).value is None


def test_both_legs_of_the_actor_agree(policy):
    actor = policy.actor_only()
    start, obs, resets = actor.initial_state(B), observations(0, 6, B), torch.rand(6, B) < 0.3
    actions, rollout = [], []
    for t in range(6):
        step = actor.act({k: v[t] for k, v in obs.items()}, resets[t])
        actions.append(step.action)
        rollout.append(step.log_prob)
    ev = actor.evaluate(obs, torch.stack(actions), start, resets)
    torch.testing.assert_close(ev.log_prob, torch.stack(rollout), atol=1e-5, rtol=0)
    assert ev.value is None and ev.entropy.shape == (6, B)


def test_weights_are_shared_and_the_critics_are_left_behind(policy):
    actor = policy.actor_only()
    full = dict(policy.named_parameters())
    assert all(any(p is q for q in full.values()) for p in actor.parameters())
    assert not any("critic" in name for name in actor.state_dict())
    with torch.no_grad():
        policy.actor.bias[2] = 1e6
    assert (actor.act(observations(0, B)).action == 2).all()


def test_only_the_actors_state_is_kept():
    names = {
        kind: list(state_ops.named_leaves(make(ACTIONS["box"]).actor_only().initial_state(1)))
        for kind, make in POLICIES.items()
    }
    assert names == {
        "shared": ["h", "c"],
        "separate": ["h"],
        "none": ["h", "c"],
        "memoryless": [],
        "sliced": ["h", "c"],
    }


def test_memories_are_separate(policy):
    actor = policy.actor_only()
    policy.act(observations(0, B))
    assert actor.memory.num_envs == 0 and actor.actor_only() is actor


def test_predict_and_runner_need_no_value(policy):
    actor, obs = policy.actor_only(), {k: v.numpy() for k, v in observations(0, B).items()}
    expected, state = policy.predict(obs, deterministic=True)
    action, own = actor.predict(obs, deterministic=True)
    np.testing.assert_array_equal(action, expected)
    again, _ = actor.predict(obs, own, np.zeros(B, bool), deterministic=True)
    np.testing.assert_array_equal(again, policy.predict(obs, state, np.zeros(B, bool), deterministic=True)[0])
    one = {k: v[0] for k, v in obs.items()}
    for given, want in ((obs, expected), (one, expected[0])):
        chosen = hf.Runner(actor).act(given)
        assert chosen.value is None
        np.testing.assert_array_equal(chosen.action, want)


def test_asking_for_a_value_is_an_error_that_says_where_it_is(policy):
    with pytest.raises(ValueError, match="Actor has no critic, so there is no value; use the full policy"):
        policy.actor_only().peek_value(observations(0, B))


def test_a_policy_of_your_own_is_told_what_to_write():
    class Mine(hf.RecurrentPolicy):
        def __init__(self):
            super().__init__(hf.GRU(3, 4))
            self.head = nn.Linear(4, 2)

        def encode(self, obs):
            return obs

        def decode(self, features):
            return torch.distributions.Categorical(logits=self.head(features)), None

    with pytest.raises(NotImplementedError, match=r"Mine does not say .* write actor_only\(self\)"):
        Mine().actor_only()
    assert Mine().act(torch.zeros(B, 3)).value is None  # a policy without a value may also be written directly
