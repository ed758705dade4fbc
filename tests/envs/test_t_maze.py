"""TMaze, by episodes worked out by hand, and the best a policy without memory can do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from holdfast.envs import TMaze
from holdfast.envs.t_maze import CORRIDOR, DOWN, FORWARD, JUNCTION, SIGN_DOWN, SIGN_UP, UP


def maze_with_both_goals(length):
    """Environment 0 has its goal up, environment 1 down, in every episode."""
    env = TMaze(num_envs=2, length=length)
    env.draw = lambda: torch.tensor([UP, DOWN])
    return env


def seen(obs):
    """One-hot rows [B, 4] as the list of what they show."""
    assert (obs.sum(-1) == 1).all() and obs.dtype == torch.float32
    return obs.argmax(-1).tolist()


def play(env, *actions):
    obs, rewards, terminated, truncated, info = env.step(torch.tensor(actions))
    return seen(obs), rewards.tolist(), terminated.tolist(), truncated.tolist(), seen(info["final_obs"])


def test_the_sign_is_shown_once_then_corridor_then_junction():
    env = maze_with_both_goals(length=3)
    no, zero = [False, False], [0.0, 0.0]
    assert seen(env.reset()[0]) == [SIGN_UP, SIGN_DOWN]
    assert play(env, FORWARD, FORWARD) == ([CORRIDOR] * 2, zero, no, no, [CORRIDOR] * 2)  # cell 1
    assert play(env, FORWARD, FORWARD) == ([CORRIDOR] * 2, zero, no, no, [CORRIDOR] * 2)  # cell 2
    assert play(env, FORWARD, FORWARD) == ([JUNCTION] * 2, zero, no, no, [JUNCTION] * 2)
    # The right turn and the wrong one. New episodes begin in the same step; final_obs shows the junction.
    yes = [True, True]
    assert play(env, UP, UP) == ([SIGN_UP, SIGN_DOWN], [1.0, -1.0], yes, no, [JUNCTION] * 2)
    for _ in range(3):
        play(env, FORWARD, FORWARD)
    assert play(env, DOWN, DOWN)[1] == [-1.0, 1.0]


def test_turning_in_the_corridor_and_walking_on_at_the_junction_do_nothing():
    env = maze_with_both_goals(length=2)
    env.reset()
    no = [False, False]
    assert play(env, UP, DOWN)[:4] == ([CORRIDOR] * 2, [0.0, 0.0], no, no)  # the sign is gone, nobody moved
    assert play(env, FORWARD, DOWN)[:4] == ([CORRIDOR] * 2, [0.0, 0.0], no, no)  # cells 1 and 0
    assert play(env, FORWARD, FORWARD)[:4] == ([JUNCTION, CORRIDOR], [0.0, 0.0], no, no)
    assert play(env, FORWARD, FORWARD)[:4] == ([JUNCTION, JUNCTION], [0.0, 0.0], no, no)
    assert play(env, FORWARD, DOWN)[:4] == ([JUNCTION, SIGN_DOWN], [0.0, 1.0], [False, True], no)
    # Step 6 = 3 x 2 of environment 0, which never turned; environment 1 takes the first of its next episode.
    assert play(env, FORWARD, FORWARD) == (
        [SIGN_UP, CORRIDOR],
        [0.0, 0.0],
        no,
        [True, False],
        [JUNCTION, CORRIDOR],
    )


def test_a_turn_in_the_last_step_terminates_and_is_rewarded():
    env = maze_with_both_goals(length=2)
    env.reset()
    for _ in range(5):
        play(env, FORWARD, FORWARD)
    _, rewards, terminated, truncated, _ = play(env, UP, UP)
    assert (rewards, terminated, truncated) == ([1.0, -1.0], [True, True], [False, False])


def test_the_time_limit_counts_from_the_start_of_each_episode():
    env = TMaze(num_envs=5, length=4)
    env.reset(seed=0)
    ends = [t for t in range(1, 37) if env.step(torch.full((5,), UP))[3].all()]
    assert ends == [12, 24, 36]


@pytest.mark.parametrize("length", [2, 3, 20])
def test_no_deterministic_policy_without_memory_is_above_0(length):
    returns = []
    for action_for in itertools.product((UP, DOWN, FORWARD), repeat=4):  # all 81
        env = maze_with_both_goals(length)
        action_of = torch.tensor(action_for)
        obs, total, open_ = env.reset()[0], torch.zeros(2), torch.ones(2, dtype=torch.bool)
        for _ in range(3 * length):
            obs, rewards, _, _, info = env.step(action_of[obs.argmax(-1)])
            total += rewards * open_
            open_ &= ~info["_final_obs"]
        assert not open_.any()
        returns.append(float(total.mean()))
    assert max(returns) == 0.0


def memoryless_return(length, after_up, after_down, onward, turn_up):
    """Exact mean return, given P(forward) after each sign and in the corridor and P(up) at the junction."""
    total = 0.0
    for first, worth in ((after_up, 1.0), (after_down, -1.0)):
        at = np.zeros(length + 1)  # probability of each position
        at[0], at[1] = 1 - first, first
        for _ in range(1, 3 * length):
            total += worth * turn_up * at[-1] / 2
            moved = at[:-1] * onward
            at[-1] *= 1 - turn_up
            at[:-1] -= moved
            at[1:] += moved
    return total


def test_arriving_late_at_random_is_worth_little_without_memory():
    """Waiting at one sign only, then dawdling: the time limit cuts off more episodes of that sign."""
    best = max(memoryless_return(20, 1, 0, p, q) for p in np.linspace(0, 1, 61) for q in (0.1, 0.5, 1.0))
    assert 0.05 < best < 0.06
    assert memoryless_return(20, 1, 1, 0.4, 1) == pytest.approx(0, abs=1e-12)


def test_remembering_the_sign_returns_1_in_length_plus_1_steps():
    env = TMaze(num_envs=64, length=20)
    obs, _ = env.reset(seed=1)
    sign = obs.argmax(-1)
    assert 0 < sign.sum() < 64
    for _ in range(20):
        obs, rewards, *_ = env.step(torch.full((64,), FORWARD))
        assert (rewards == 0).all()
    assert (obs[:, JUNCTION] == 1).all()
    _, rewards, terminated, _, _ = env.step(sign)
    assert (rewards == 1).all() and terminated.all()


def test_a_maze_too_short_to_need_memory_is_refused():
    with pytest.raises(ValueError, match="length is 1; expected at least 2"):
        TMaze(num_envs=1, length=1)
