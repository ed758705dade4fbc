"""Labyrinths: episodes worked out by hand in one small maze. `test_agreement.py` plays next to POPGym."""

from __future__ import annotations

import pytest
import torch

from holdfast.envs import LabyrinthEscape, LabyrinthExplore

LEFT, RIGHT, UP, DOWN = range(4)
MAZE = """\
███████
█     █
█ ███ █
█ █   █
█ █ ███
█ █   █
███████"""
WAY_OUT = [DOWN, *[RIGHT] * 4, DOWN, DOWN, LEFT, LEFT, DOWN, DOWN, RIGHT, RIGHT, DOWN]
DETOUR = [DOWN, *[DOWN] * 4, *[UP] * 4, *WAY_OUT[1:-1]]  # the dead end on the left, and then the rest


def start(make, **kwargs):
    """One environment in MAZE, entrance above its first column, exit below its last one."""
    env = make(1, maze_size=6, num_mazes=1, **kwargs)
    env._set_mazes(torch.tensor([[letter == "█" for letter in MAZE.replace("\n", "")]]))
    (gate,) = ((env._starts == 1) & (env._exits == 47)).nonzero().flatten()
    env.draw = lambda: gate.view(1, 1)
    return env, env.reset()[0]


def play(env, actions):
    """Rewards [T], and what the last step returned."""
    steps = [env.step(torch.tensor([action])) for action in actions]
    assert not any(step[2] or step[3] for step in steps[:-1])
    return torch.cat([step[1] for step in steps]), steps[-1]


@pytest.mark.parametrize("make", [LabyrinthEscape, LabyrinthExplore])
def test_the_view_has_the_maze_around_the_player_and_the_last_action(make):
    env, obs = start(make)
    assert obs.tolist() == [[1, 2, 1, 1, 0, 0, 1, 1, 1, 4]]  # two rows of the maze, and walls below
    for action in (UP, LEFT):  # out of the maze, and into the wall
        obs, rewards, *_ = env.step(torch.tensor([action]))
        assert obs.tolist() == [[1, 2, 1, 1, 0, 0, 1, 1, 1, action]] and rewards.item() == -1 / 1024
    assert env.step(torch.tensor([DOWN]))[0].tolist() == [[1, 2, 1, 1, 0, 0, 1, 0, 1, DOWN]]
    _, (obs, *_) = play(env, WAY_OUT[1:-1])
    below = 3 if make is LabyrinthEscape else 1
    assert obs.tolist() == [[1, 1, 1, 0, 0, 1, 1, below, 1, RIGHT]]


def test_the_exit_ends_the_episode_with_1():
    env, first = start(LabyrinthEscape)
    rewards, (obs, _, terminated, truncated, info) = play(env, WAY_OUT)
    assert rewards.tolist() == [-1 / 1024] * 13 + [1 - 1 / 1024]
    assert (terminated.item(), truncated.item()) == (True, False)
    assert info["final_obs"].tolist() == [[0, 0, 1, 1, 3, 1, 1, 1, 1, DOWN]] and torch.equal(obs, first)


def test_every_free_cell_pays_once_and_the_last_one_ends_the_episode():
    env, _ = start(LabyrinthExplore)
    gain, cost = torch.tensor(1 / 17).item(), -1 / 1024
    for _ in range(2):  # the second episode has forgotten what the first one visited
        rewards, (_, _, terminated, truncated, _) = play(env, DETOUR)
        assert rewards.tolist() == [gain] * 5 + [cost] * 4 + [gain] * 12
        assert (terminated.item(), truncated.item()) == (True, False)


@pytest.mark.parametrize("make", [LabyrinthEscape, LabyrinthExplore])
def test_the_time_limit_truncates(make):
    env, _ = start(make, episode_length=6)
    _, (_, _, terminated, truncated, _) = play(env, [UP] * 5)
    assert (terminated.item(), truncated.item()) == (False, True)


def test_the_player_is_drawn_in_its_maze_and_where_it_was():
    env, _ = start(LabyrinthExplore, render_mode="ansi")
    play(env, [DOWN, RIGHT, RIGHT])
    assert env.render() == (MAZE.replace("███████\n█     █", "█S█████\n█··@  █", 1),)
    env, _ = start(LabyrinthEscape, render_mode="ansi")
    play(env, [DOWN, RIGHT, RIGHT])
    assert env.render()[0].startswith("█S█████\n█  @  █\n") and env.render()[0].endswith("\n█████E█")


@pytest.mark.parametrize("name", ["maze", "start", "position", "exit"])
def test_a_saved_place_that_does_not_exist_is_refused(name):
    env, _ = start(LabyrinthEscape)
    saved = env.state_dict()
    saved["state"][name] += 1000
    with pytest.raises(ValueError, match=f"saved '{name}' must be from 0 to "):
        env.load_state_dict(saved)
