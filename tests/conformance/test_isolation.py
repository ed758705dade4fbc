"""Nothing crosses an episode boundary, or passes from one environment or agent to another; inside, gradients flow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.episodes import assert_close, assert_differs, boundaries, flags, for_resets, quick, roll, warm_up
from holdfast import state as state_ops


def with_gradient(state):
    """A copy whose leaves take gradients; integers do not."""
    return state_ops.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(leaf.is_floating_point()), state)


def gradients(driver, rollout, t, b):
    """d(outputs at step t of environment b) / d(observations [T, B, ...], start state leaves)."""
    obs, state = rollout.obs.clone().requires_grad_(), with_gradient(rollout.start)
    ev = driver.evaluate(obs, rollout.actions, state, rollout.dones, rollout.truncateds)
    leaves = [leaf for leaf in state_ops.leaves(state) if leaf.is_floating_point()]
    # The weights make the two outputs' gradients unable to cancel.
    said = ev.value[t, b] * 1.7 + ev.log_prob[t, b]
    return torch.autograd.grad(said, [obs, *leaves], allow_unused=True)


def size(gradient, *index):
    return 0.0 if gradient is None else gradient[index].abs().sum().item()


@quick
@given(ends=boundaries(min_steps=2), where=st.integers(0, 100), seed=st.integers(0, 100))
@for_resets("zero", "learned")
def test_no_value_and_no_gradient_crosses_a_reset(make, ends, where, seed):
    dones, truncateds = (flag.clone() for flag in ends)
    T, B = dones.shape
    edge, b = 1 + where % (T - 1), where % B
    dones[edge, b] = True
    driver = make()
    warm_up(driver, B)
    rollout = roll(driver, driver.observations(T, B, seed=seed), dones, truncateds)
    # Values: another past, in training and in the rollout, gives the same present.
    other = rollout.obs.clone()
    other[:edge, b] += 3.0
    moved = driver.evaluate(other, rollout.actions, rollout.start, dones, truncateds)
    assert torch.equal(moved.signature[edge:, b], rollout.replay(driver).signature[edge:, b])
    assert_differs(moved.value[:edge, b], rollout.value[:edge, b])
    again = make()
    warm_up(again, B)
    assert torch.equal(roll(again, other, dones, truncateds).signature[edge:, b], rollout.signature[edge:, b])
    # Gradients: exactly zero.
    d_obs, *d_state = gradients(driver, rollout, T - 1, b)
    assert size(d_obs, slice(0, edge)) == 0.0
    assert all(size(d, b) == 0.0 for d in d_state)


@for_resets("detach")
def test_detach_lets_values_cross_and_cuts_their_gradient(make):
    driver = make()
    T, B, edge = 5, 2, 2
    warm_up(driver, B)
    rollout = roll(driver, driver.observations(T, B), flags(T, B, (edge, 0)), None)
    d_obs, *d_state = gradients(driver, rollout, T - 1, 0)
    assert size(d_obs, slice(0, edge)) == 0.0 and all(size(d) == 0.0 for d in d_state)
    assert size(d_obs, edge, 0) > 0
    other = rollout.obs.clone()
    other[:edge, 0] += 3.0
    moved = driver.evaluate(other, rollout.actions, rollout.start, rollout.dones)
    assert_differs(moved.value[edge:, 0], rollout.value[edge:, 0])


@for_resets("never")
def test_never_lets_values_and_gradients_cross(make):
    driver = make()
    T, B, edge = 5, 2, 2
    warm_up(driver, B)
    rollout = roll(driver, driver.observations(T, B), flags(T, B, (edge, 0)), None)
    d_obs, *d_state = gradients(driver, rollout, T - 1, 0)
    assert size(d_obs, edge - 1, 0) > 0 and all(size(d, 0) > 0 for d in d_state if d is not None)


def test_gradients_reach_every_step_inside_an_episode_and_no_other_environment(make):
    driver = make()
    T, B, L = 5, 3, 2  # three different sizes
    warm_up(driver, B)
    rollout = roll(driver, driver.observations(T, B), flags(T, B), None)
    d_obs, *d_state = gradients(driver, rollout, T - 1, 1)
    assert all(size(d_obs, t, 1) > 1e-7 for t in range(T)), "the window of backpropagation is shorter than the segment"
    assert any(size(d, 1) > 1e-7 for d in d_state)
    for b in (0, L):
        assert size(d_obs, slice(None), b) == 0.0 and all(size(d, b) == 0.0 for d in d_state)


def test_a_row_depends_only_on_its_environment_and_its_past(make):
    driver = make()
    T, B = 5, 3
    warm_up(driver, B)
    rollout = roll(driver, driver.observations(T, B))
    before = rollout.replay(driver).signature
    for t, b in ((0, 1), (2, 0), (T - 1, 2)):
        obs = rollout.obs.clone()
        obs[t, b] += 2.0
        moved = driver.evaluate(obs, rollout.actions, rollout.start).signature != before
        expected = torch.zeros(T, B, dtype=torch.bool)
        expected[t:, b] = True
        assert torch.equal(moved.any(-1), expected)


@for_resets("zero", "learned")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_reset_clears_nan_and_inf_and_touches_no_other_environment(make, poison):
    T, B, bad = 3, 3, 1
    clean, poisoned, fresh = make(), make(), make()
    for driver in (clean, poisoned):
        warm_up(driver, B)
    state = state_ops.clone(poisoned.memory.read())
    for leaf in state_ops.leaves(state):
        if leaf.is_floating_point():
            leaf[bad] = poison
    poisoned.memory.write(state)
    obs, ends = clean.observations(T, B, seed=4), flags(T, B, (0, bad))
    expected, got = roll(clean, obs, ends), roll(poisoned, obs, ends)
    others = [0, 2]
    assert torch.isfinite(got.signature).all()
    assert torch.equal(got.signature[:, others], expected.signature[:, others])
    assert torch.equal(got.replay(poisoned).signature, expected.replay(clean).signature)
    assert_close(got.signature[:, [bad]], roll(fresh, obs[:, [bad]]).signature)
    # And no NaN comes back through the gradient of the poisoned start state.
    d_obs, *d_state = gradients(poisoned, got, T - 1, bad)
    assert torch.isfinite(d_obs).all() and all(size(d, bad) == 0.0 for d in d_state)


@quick
@given(data=st.data())
def test_permuted_partial_and_interleaved_ids_give_each_environment_its_solo_run(make, data):
    driver = make()
    envs = 4
    steps = data.draw(st.lists(st.lists(st.integers(0, envs - 1), min_size=1, unique=True), min_size=3, max_size=7))
    obs = driver.observations(len(steps), envs, seed=6)
    ends = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(steps) * envs, max_size=len(steps) * envs)))
    ends = ends.view(len(steps), envs) & (torch.arange(envs) > 0)  # environment 0 never ends
    seen: dict[int, list] = {env: [] for env in range(envs)}
    for t, ids in enumerate(steps):
        rows = torch.tensor(ids)
        step = driver.act(obs[t, rows], ends[t, rows], None, rows)
        for row, env in enumerate(ids):
            seen[env].append((t, step.signature[row]))
    for env, trace in seen.items():
        solo = make()
        for t, signature in trace:
            alone = solo.act(obs[t, [env]], ends[t, [env]]).signature[0]
            assert_close(signature, alone)


def test_an_unknown_id_is_fresh_and_never_somebody_elses(make):
    driver, fresh = make(), make()
    warm_up(driver, 2)
    obs = driver.observations(1, seed=3)
    first = fresh.act(obs).signature
    assert torch.equal(driver.act(obs, env_ids=[7]).signature, first)
    assert_differs(driver.act(obs, env_ids=[1]).signature, first)
    assert torch.equal(driver.act(obs, env_ids=[4]).signature, first)  # below 7, still never seen


@for_resets("zero", "learned")
def test_flags_are_a_mask_and_never_an_index(make):
    """dones [0, 0, 0, 1] must reset environment 3, not environments 0 and 1."""
    driver, plain = make(), make()
    for each in (driver, plain):
        warm_up(each, 4)
    obs = driver.observations(4, seed=5)
    got, expected = driver.act(obs, flags(1, 4, (0, 3))[0]).signature, plain.act(obs).signature
    assert torch.equal(got[:3], expected[:3])
    assert_differs(got[3], expected[3])


def test_interleaved_agents_on_one_module_equal_separate_ones(make):
    T, B = 4, 2
    shared = make()
    agents = [shared, shared.agent()]
    obs = [shared.observations(T, B, seed=20), shared.observations(T, B, seed=21)]
    together: list[list[torch.Tensor]] = [[], []]
    for t in range(T):
        for which in (0, 1) if t % 2 else (1, 0):
            together[which].append(agents[which].act(obs[which][t]).signature)
    for which in (0, 1):
        assert torch.equal(torch.stack(together[which]), roll(make(), obs[which]).signature)
