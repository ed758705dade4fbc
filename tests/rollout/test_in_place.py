"""A rollout updates a large state in place: the same segments as with pure steps, and no snapshot changes."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast import envs
from holdfast.state import leaves

STEPS, ENVS = 16, 3


def collector(pure: bool) -> hf.Collector:
    torch.manual_seed(0)
    core = hf.Stack([hf.Block(hf.WindowAttention(8, 8, window=5, num_heads=2)), hf.GRU(8, 6)])
    core.supports_advance = not pure
    policy = hf.ActorCritic(spaces.Discrete(4), spaces.Discrete(4), core=core, hidden_size=8)
    env = envs.make("holdfast/RepeatPreviousEasy-v0", ENVS)
    return hf.Collector(env, policy, STEPS, bptt=4, seed=3, memory=hf.Memory(core))


def test_segments_equal_those_of_pure_steps():
    segments = []
    for pure in (True, False):
        torch.manual_seed(1)
        rolling = collector(pure)
        segments.append([rolling.rollout() for _ in range(5)])  # an episode has 51 steps
    assert any(bool(segment.resets[1:].any()) for segment in segments[0])
    for expected, got in zip(*segments):
        for name in ("obs", "actions", "log_prob", "value", "advantage"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        for one, other in zip(leaves(expected.chunk_states), leaves(got.chunk_states)):
            assert torch.equal(one, other)


def test_the_tensors_stay_where_they_are_and_snapshots_do_not_change():
    rolling = collector(pure=False)
    before = rolling.policy.memory.read()
    rolling.rollout()
    places = [leaf.data_ptr() for leaf in leaves(rolling.memory.take(ENVS)[0])]
    snapshot = rolling.memory.read()
    copies = [leaf.clone() for leaf in leaves(snapshot)]
    segment = rolling.rollout()
    assert [leaf.data_ptr() for leaf in leaves(rolling.memory.take(ENVS)[0])] == places
    assert all(map(torch.equal, leaves(snapshot), copies))
    assert all(map(torch.equal, leaves(segment.start_state), copies)), "training starts where the rollout started"
    assert len(leaves(before)[0]) == 0, "another memory is not involved"


def test_training_replays_a_rollout_in_place():
    rolling = collector(pure=False)
    for _ in range(4):
        segment = rolling.rollout()
        ev = rolling.policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
        torch.testing.assert_close(ev.log_prob, segment.log_prob, atol=1e-5, rtol=0)


def test_a_memory_that_was_read_before_it_is_updated_in_place_leaves_the_reader_alone():
    rolling = collector(pure=False)
    memory, core = rolling.memory, rolling.policy.core
    memory.write(core(torch.randn(6, ENVS, 8))[1])
    snapshot = memory.read()
    copies = [leaf.clone() for leaf in leaves(snapshot)]
    memory.update_in_place()
    rolling.policy.act(torch.zeros(ENVS, dtype=torch.long), memory=memory)
    assert all(map(torch.equal, leaves(snapshot), copies))
    assert not torch.equal(leaves(memory.read())[0], copies[0])


@pytest.mark.parametrize("core", [hf.LSTM(8, 8), hf.GRU(8, 8)])
def test_memories_of_other_cores_stay_as_they_are(core):
    memory = hf.Memory(core)
    memory.update_in_place()
    assert not memory.in_place
