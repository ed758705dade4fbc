"""`hf.MLSTM`: its formula, its memory, steps against chunks. The laws are tested for all cores."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.cores.chrono import chrono_init_


def test_a_step_is_the_formula():
    torch.manual_seed(0)
    core = hf.MLSTM(3, 4, num_heads=1)
    x, memory = torch.randn(1, 3), torch.randn(1, 1, 4, 4)
    y, state = core(x, {"memory": memory, "position": torch.tensor([6], dtype=torch.int32)})
    q, k, v, o = core.qkvo(x)[0].split(4)
    i, f = core.gates(x)[0].sigmoid()
    # Channels 0 and 2 are a plane, 1 and 3 another. They turn back by 1/8 and 3/8 of a circle per step, and this is step 7.
    eighths = torch.polar(torch.ones(2), -torch.tensor([7.0, 21.0]) * math.pi / 4)

    def turned(channels):
        planes = torch.complex(channels[:2], channels[2:]) * eighths
        return torch.cat([planes.real, planes.imag])

    expected = f * memory[0, 0] + i * torch.outer(v, turned(k / k.norm()))
    torch.testing.assert_close(state["memory"][0, 0], expected)
    read = expected @ turned(q)
    torch.testing.assert_close(y[0], core.out(o.sigmoid() * read / (1 + read.square().mean()).sqrt()))
    assert state["position"].tolist() == [7]


def test_positions_repeat_when_all_keys_are_back_where_they_began():
    core = hf.MLSTM(3, 8, num_heads=2)  # two heads of four channels: four planes
    state = core(torch.randn(37, 1, 3))[1]
    assert state["position"].tolist() == [37 % 16]
    x = torch.randn(5, 1, 3)
    longer = core(x, {**core.initial_state(1), "position": torch.tensor([16], dtype=torch.int32)})[0]
    torch.testing.assert_close(longer, core(x)[0], atol=0, rtol=0)


@pytest.mark.parametrize("reset", ["zero", "learned", "detach", "never"])
def test_a_sequence_counts_positions_as_its_steps_do(reset):
    core, resets = hf.MLSTM(3, 8, num_heads=2, reset=reset), torch.rand(60, 3) < 0.1
    x, state = torch.randn(60, 3, 3), core.initial_state(3)
    for x_t, resets_t in zip(x, resets):
        state = core(x_t, state, resets_t)[1]
    assert torch.equal(core(x, None, resets)[1]["position"], state["position"])


def test_a_constant_query_finds_what_was_seen_a_given_number_of_steps_ago():
    """Keys and queries that do not depend on the input: by planes that turn, age alone selects a value."""
    T, ago, size = 40, 17, 64
    core = hf.MLSTM(size, size, num_heads=1)
    planes = 24
    angles = (torch.arange(planes) + 0.5) * (torch.pi / planes)
    with torch.no_grad():
        core.qkvo.weight.zero_()
        core.qkvo.weight[2 * size : 3 * size] = 1e-3 * torch.eye(
            size
        )  # values are the input; small: nothing is limited
        rest = torch.zeros(size - 2 * planes)
        core.qkvo.bias[:size] = torch.cat([(ago * angles).cos(), (ago * angles).sin(), rest])  # a key after `ago` turns
        core.qkvo.bias[size : 2 * size] = torch.cat([torch.ones(planes), torch.zeros(planes), rest])
        core.qkvo.bias[2 * size :] = 0.0
        core.gates.weight.zero_()
        core.gates.bias.fill_(40.0)  # open
        core.out.weight.copy_(torch.eye(size))
        core.out.bias.zero_()
    x = torch.randn(T, 1, size)
    y, _ = core(x)
    found = y / (0.5 * 1e-3 * planes / planes**0.5)  # the output gate; a key has length 1
    torch.testing.assert_close(found[ago:], x[:-ago], atol=1e-4, rtol=1e-4)


def replay_gap(policy, obs, resets, cuts):
    """Law 1: the largest difference of a log-probability between steps, and segments that end at `cuts`."""
    start, worst = policy.initial_state(obs.shape[1]), 0.0
    memory = hf.Memory(policy.core)
    for begin, end in itertools.pairwise([0, *cuts, len(obs)]):
        steps = [policy.act(o, r, memory=memory) for o, r in zip(obs[begin:end], resets[begin:end])]
        actions, expected = torch.stack([s.action for s in steps]), torch.stack([s.log_prob for s in steps])
        with torch.no_grad():
            ev = policy.evaluate(obs[begin:end], actions, start, resets[begin:end])
        worst = max(worst, float((ev.log_prob - expected).abs().max()))
        start = memory.read()
    return worst


def policy_of(seed, span, layers=1, reset="zero"):
    torch.manual_seed(seed)
    blocks = [hf.Block(hf.MLSTM(32, 32, reset=reset)) for _ in range(layers)]
    policy = hf.ActorCritic(spaces.Box(-9, 9, (4,)), spaces.Discrete(6), core=hf.Stack(blocks), hidden_size=32)
    chrono_init_(policy.core, span)
    torch.nn.init.orthogonal_(policy.actor.weight)  # logits as large as features
    return policy


def corridor(T, B):
    """The same input in all steps but the first: what is stored adds up in one direction."""
    return torch.eye(4)[torch.cat([torch.randint(0, 2, (1, B)), torch.full((T - 1, B), 2)])]


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000), span=st.integers(2, 1000), cuts=st.sets(st.integers(1, 399), max_size=4), layers=st.integers(1, 2),
    rate=st.sampled_from([0.0, 0.003, 0.05]), reset=st.sampled_from(["zero", "learned", "never"]), empty=st.booleans(),
)  # fmt: skip
def test_log_probabilities_of_steps_and_segments_agree(seed, span, cuts, layers, rate, reset, empty):
    policy = policy_of(seed, span, layers, reset)
    obs = corridor(400, 4) if empty else torch.randn(400, 4, 4)
    assert replay_gap(policy, obs, torch.rand(400, 4) < rate, sorted(cuts)) <= 1e-5


@pytest.mark.parametrize("draw", [corridor, lambda T, B: torch.randn(T, B, 4)], ids=["corridor", "normal"])
def test_what_1000_steps_have_stored_costs_no_digits_of_segments_of_2048_steps(draw):
    policy = policy_of(7, span=1000)
    assert replay_gap(policy, draw(2048, 4), torch.zeros(2048, 4, dtype=torch.bool), []) <= 5e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_its_memory_is_float32_in_every_module(dtype):
    core = hf.MLSTM(4, 8).to(dtype)
    y, state = core(torch.randn(3, 2, 4).to(dtype))
    assert y.dtype == dtype and state["memory"].dtype == torch.float32


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="hidden_size 6 must be a multiple of num_heads 4"):
        hf.MLSTM(4, 6)
    with pytest.raises(ValueError, match="unknown reset mode 'zeros'"):
        hf.MLSTM(4, 8, reset="zeros")
    with pytest.raises(ValueError, match="unknown kernel 'native'"):
        hf.MLSTM(4, 8, kernel="native")
