"""Decks are dealt as shuffled packs are, and the card tasks ask for the right card. Episodes worked out by hand."""

from __future__ import annotations

import pytest
import torch

from holdfast.envs import RepeatFirst, RepeatPrevious


def test_repeat_previous_asks_for_the_card_k_minus_1_steps_back():
    env = RepeatPrevious(num_envs=8, k=4)
    cards = [env.reset(seed=3)[0]]
    total = torch.zeros(8)
    for t in range(51):
        answer = cards[t - 3] if t >= 3 else torch.zeros(8, dtype=torch.int64)
        obs, rewards, terminated, truncated, _ = env.step(answer)
        cards.append(obs)
        assert torch.allclose(rewards, torch.full((8,), 1 / 48 if t >= 3 else 0.0))
        assert terminated.all() == (t == 50) and not truncated.any()
        total += rewards
    assert torch.allclose(total, torch.ones(8))


@pytest.mark.parametrize("make_env", [lambda: RepeatPrevious(64, num_decks=2), lambda: RepeatFirst(64, num_decks=2)])
def test_an_episode_deals_every_card_of_the_pack_once(make_env):
    env = make_env()
    seen = [env.reset(seed=5)[0]]
    for _ in range(103):
        _, _, terminated, _, info = env.step(torch.zeros(64, dtype=torch.int64))
        seen.append(info["final_obs"])
    assert terminated.all()
    dealt = torch.nn.functional.one_hot(torch.stack(seen), 4).sum(0)  # [B, 4]
    assert (dealt == 26).all()


def test_cards_come_as_from_a_shuffled_pack():
    env = RepeatFirst(num_envs=40_000)
    first = env.reset(seed=11)[0]
    second = env.step(first)[0]
    tenth = [env.step(first)[0] for _ in range(8)][-1]
    pair = torch.bincount(first * 4 + second, minlength=16) / 40_000
    same, other = 13 * 12 / (52 * 51), 13 * 13 / (52 * 51)
    expected = torch.full((4, 4), other).fill_diagonal_(same).flatten()
    four_sigma = 4 * (expected * (1 - expected) / 40_000).sqrt()
    assert ((pair - expected).abs() < four_sigma).all()
    later = torch.bincount(first * 4 + tenth, minlength=16) / 40_000  # exchangeable: any later card is like the second
    assert ((later - expected).abs() < four_sigma).all()
