"""The training leg repeats the rollout: any boundaries, any chunking, any number of episodes in a row."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.episodes import (
    assert_close,
    assert_differs,
    assert_replays,
    boundaries,
    flags,
    for_resets,
    quick,
    roll,
    warm_up,
)


@quick
@given(first=boundaries(min_steps=2), seed=st.integers(0, 1000))
def test_training_repeats_the_rollout_in_two_segments_with_any_boundaries(make, first, seed):
    driver = make()
    dones, truncateds = first
    T, B = dones.shape
    one = roll(driver, driver.observations(T, B, seed=seed), dones, truncateds)
    two = roll(driver, driver.observations(T, B, seed=seed + 1), dones.flip(0), truncateds.flip(1))
    assert_replays(driver, one)
    assert_replays(driver, two)


def test_boundaries_at_the_first_and_last_step_of_a_segment_replay(make):
    driver = make()
    T, B = 4, 3
    warm_up(driver, B)
    dones, truncateds = flags(T, B, (0, 0), (T - 1, 1)), flags(T, B, (0, 2), (T - 1, 2))
    one = roll(driver, driver.observations(T, B, seed=1), dones, truncateds)
    two = roll(driver, driver.observations(T, B, seed=2), flags(T, B, (0, 1)), flags(T, B))
    assert_replays(driver, one)
    assert_replays(driver, two)


@for_resets("zero", "learned")
def test_the_start_state_is_the_one_before_the_reset_and_the_reset_still_happens(make):
    driver = make()
    warm_up(driver, 2)
    fresh = make()
    obs = driver.observations(3, 2, seed=1)
    rollout = roll(driver, obs, flags(3, 2, (0, 0), (0, 1)), flags(3, 2))
    assert_close(rollout.signature, roll(fresh, obs).signature)
    assert_close(rollout.replay(driver).value, rollout.value)
    # The same start state without the flag is another episode's memory.
    assert_differs(rollout.replay(driver, dones=flags(3, 2)).value, rollout.value)


@for_resets("zero", "learned")
def test_a_truncation_resets_in_both_legs_as_a_termination_does(make):
    T, B = 4, 2
    obs, ends = make().observations(T, B, seed=3), flags(T, B, (2, 0), (2, 1))
    first_step = make().act(obs[2]).signature
    for dones, truncateds in ((ends, None), (None, ends), (ends, ~ends & False), (~ends & False, ends), (ends, ends)):
        driver = make()
        rollout = roll(driver, obs, dones, truncateds)
        assert_close(rollout.signature[2], first_step)
        assert_replays(driver, rollout)


@for_resets("detach", "never")
def test_modes_that_keep_values_give_the_same_outputs_with_and_without_flags(make):
    obs, ends = make().observations(5, 2, seed=3), flags(5, 2, (2, 0), (3, 1), (0, 1))
    one, two = make(), make()
    warm_up(one, 2)
    warm_up(two, 2)
    flagged, plain = roll(one, obs, ends, None), roll(two, obs)
    assert_close(flagged.signature, plain.signature)
    assert_replays(one, flagged)


def test_missing_flags_mean_no_reset_and_the_state_evolves(make):
    T, B = 4, 2
    one, two = make(), make()
    obs = one.observations(2, B)[[0] + [1] * (T - 1)]  # the same observation every step but the first
    bare, all_false = roll(one, obs), roll(two, obs, flags(T, B), flags(T, B))
    assert torch.equal(bare.signature, all_false.signature)
    for t in range(1, T):
        assert_differs(bare.signature[t], bare.signature[t - 1])
    assert_close(bare.replay(one).signature, bare.replay(one, dones=flags(T, B), truncateds=flags(T, B)).signature)


@quick
@given(ends=boundaries(max_steps=7, min_steps=2), cuts=st.lists(st.integers(1, 6), max_size=3, unique=True))
def test_any_chunking_from_a_nonzero_state_gives_the_same_outputs(make, ends, cuts):
    driver = make()
    dones, truncateds = ends
    T, B = dones.shape
    warm_up(driver, B)
    obs = driver.observations(T, B, seed=5)
    edges = [0, *sorted(c for c in cuts if c < T), T]
    spans = [slice(a, b) for a, b in pairwise(edges)]
    pieces = [roll(driver, obs[s], dones[s], truncateds[s]) for s in spans]  # each keeps its own start state
    whole = make()
    warm_up(whole, B)
    rollout = roll(whole, obs, dones, truncateds)
    chunked = torch.cat([piece.replay(driver).signature for piece in pieces])
    assert_close(chunked, rollout.replay(whole).signature)
    assert_close(torch.cat([piece.value for piece in pieces]), rollout.value)


@for_resets("zero", "learned")
@quick
@given(lengths=st.lists(st.integers(1, 3), min_size=3, max_size=5), seed=st.integers(0, 1000))
def test_three_and_more_episodes_in_a_row_equal_the_episodes_run_alone(make, lengths, seed):
    driver = make()
    T, B = sum(lengths), 2
    obs = driver.observations(T, B, seed=seed)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ends = flags(T, B, *((t, b) for t in starts for b in range(B)))
    warm_up(driver, B)
    rollout = roll(driver, obs, ends)
    replayed = rollout.replay(driver)
    for start, length in zip(starts, lengths):
        alone = roll(make(), obs[start : start + length])
        span = slice(start, start + length)
        assert_close(rollout.signature[span], alone.signature)
        assert_close(replayed.value[span], alone.value)
        assert_close(replayed.log_prob[span], alone.log_prob)


@for_resets("zero", "learned")
def test_flags_one_step_early_or_one_step_late_do_not_replay(make):
    driver = make()
    T, B, t = 6, 2, 3
    warm_up(driver, B)
    rollout = roll(driver, driver.observations(T, B, seed=7), flags(T, B, (t, 0)), flags(T, B, (t, 1)))
    assert_replays(driver, rollout)
    early = rollout.replay(driver, dones=flags(T, B, (t - 1, 0)), truncateds=flags(T, B, (t - 1, 1)))
    late = rollout.replay(driver, dones=flags(T, B, (t + 1, 0)), truncateds=flags(T, B, (t + 1, 1)))
    # Early: already wrong one step before the boundary. Late: right until it, wrong at it.
    assert_close(early.value[: t - 1], rollout.value[: t - 1])
    assert_differs(early.value[t - 1], rollout.value[t - 1])
    assert_close(late.value[:t], rollout.value[:t])
    assert_differs(late.value[t], rollout.value[t])


def test_a_start_state_from_one_step_later_does_not_replay(make):
    driver = make()
    warm_up(driver, 2)
    rollout = roll(driver, driver.observations(3, 2, seed=8))
    assert_differs(rollout.replay(driver, state=driver.start_state(2)).value[0], rollout.value[0])


@for_resets("zero", "learned")
def test_padding_before_an_episode_and_rows_of_padding_change_no_state(make):
    T, B, pad = 4, 2, 3
    plain, padded, wide = make(), make(), make()
    obs = plain.observations(T, B, seed=9)
    roll(plain, obs)
    junk = plain.observations(pad, B, seed=10) * 50
    roll(padded, torch.cat([junk, obs]), flags(pad + T, B, *((pad, b) for b in range(B))))
    extra = torch.cat([obs, plain.observations(T, 1, seed=11) * 50], 1)  # a row that is no environment
    roll(wide, extra)
    for a, b, c in zip(plain.carried(), padded.carried(), wide.carried()):
        assert_close(b, a)
        assert_close(c[:B], a)


def test_environments_that_do_not_act_keep_their_state(make):
    driver = make()
    warm_up(driver, 3)
    before = [leaf.clone() for leaf in driver.carried()]
    driver.act(driver.observations(2, seed=12), env_ids=torch.tensor([2, 0]))
    for old, new in zip(before, driver.carried()):
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0], new[0]) and not torch.equal(old[2], new[2])
