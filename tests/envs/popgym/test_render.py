"""`render_mode="ansi"`: what the letters say is the state."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch

import holdfast.envs


def make(name, num_envs=2):
    env = gym.make_vec(f"holdfast/{name}-v0", num_envs=num_envs, render_mode="ansi")
    env.reset(seed=1)
    return env


def test_cards_are_named():
    env = make("HigherLowerEasy", 13)
    obs = env.step(torch.zeros(13, dtype=torch.int64))[0]
    names = ["A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K"]
    assert env.render() == tuple(names[rank] for rank in obs.tolist())
    env = make("CountRecallMedium", 4)
    obs, *_ = env.step(torch.zeros(4, dtype=torch.int64))
    assert env.render() == tuple(f"dealt {'♠♦♣♥'[d]}, how many {'♠♦♣♥'[q]}?" for d, q in obs.tolist())


def test_the_first_card_of_a_try_is_shown_until_the_second():
    env = make("ConcentrationHard", 1)
    obs, *_ = env.step(torch.tensor([14]))
    cells = env.render()[0].split()
    assert cells[14] == ["A", *map(str, range(2, 11)), "J", "Q", "K"][obs[0, 14]]
    assert cells.count("?") == 51 and env.render()[0].count("\n") == 3
    env.step(torch.tensor([14]))  # the same card again ends the try
    assert env.render()[0].split().count("?") == 52


def test_a_battleship_board_shows_ships_hits_and_misses():
    env = make("BattleshipEasy", 1)
    assert env.render()[0].count("☐") == 12 and env.render()[0].count("·") == 52
    hits = 0
    for row, column in [(0, 0), (3, 4), (7, 7), (3, 4)]:
        hits += int(env.step(torch.tensor([[row, column]]))[0])
    text = env.render()[0]
    assert (text.count("☒"), text.count("⚬")) == (hits, 3 - hits)
    assert text.split("\n")[3].split()[4] in "☒⚬"


def test_a_minesweeper_board_shows_what_was_seen():
    env = make("MineSweeperMedium", 1)
    square = int((~env.state["mines"][0]).bitwise_and(1 << torch.arange(36)).ne(0).nonzero()[0])
    obs, *_ = env.step(torch.tensor([[square // 6, square % 6]]))
    cells = env.render()[0].split()
    assert cells[square] == str(obs.item()) and cells.count(".") == 35


def test_rendering_must_be_asked_for_and_offered():
    env = holdfast.envs.HigherLower(1)
    assert env.render() is None
    with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\) before render"):
        holdfast.envs.HigherLower(1, render_mode="ansi").render()
    with pytest.raises(ValueError, match="render_mode is 'rgb_array'; expected None or ansi"):
        holdfast.envs.HigherLower(1, render_mode="rgb_array")
