"""Our environments and POPGym's own, driven with the same cards, states and actions, step by step."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import holdfast.envs
from holdfast.envs import PositionOnlyCartPole, RepeatFirst, RepeatPrevious

popgym_envs = pytest.importorskip("popgym.envs")
LEVELS = ("Easy", "Medium", "Hard")
NUM_ENVS = 3


def ours_and_popgyms(name, level):
    ours = holdfast.envs.make(f"holdfast/{name}{level}-v0", NUM_ENVS, seed=0)
    theirs = [getattr(popgym_envs, name + level)() for _ in range(NUM_ENVS)]
    return ours, theirs


def step_popgym(envs, actions):
    """One step of each with SAME_STEP autoreset: obs, rewards, terminated, truncated, final obs."""
    rows = []
    for env, action in zip(envs, actions):
        obs, reward, terminated, truncated, _ = env.step(int(action))
        final = obs
        if terminated or truncated:
            obs, _ = env.reset()
        rows.append((obs, reward, terminated, truncated, final))
    return [np.array(column) for column in zip(*rows)]


def assert_same_step(ours, theirs, rtol):
    obs, rewards, terminated, truncated, info = ours
    their_obs, their_rewards, their_terminated, their_truncated, their_final = theirs
    np.testing.assert_allclose(obs.numpy(), their_obs, rtol=rtol)
    np.testing.assert_allclose(info["final_obs"].numpy(), their_final, rtol=rtol)
    np.testing.assert_allclose(rewards.numpy(), their_rewards, rtol=1e-6)
    np.testing.assert_array_equal(terminated.numpy(), their_terminated)
    np.testing.assert_array_equal(truncated.numpy(), their_truncated)
    np.testing.assert_array_equal(info["_final_obs"].numpy(), their_terminated | their_truncated)


# --- cards ---------------------------------------------------------------------------------------------


def draws_that_deal(env, suits):
    """Random numbers [B, 1] with which our next card is of the given suit, if one is left."""
    deck = env.state["deck"]
    deck = torch.where(deck[:, -1:] == 1, env._full, deck)
    return deck.gather(1, torch.as_tensor(suits).unsqueeze(1)) - 1


def inject_popgym_hands(ours, theirs):
    """Give our environment the cards that POPGym's have on the table and in the pack."""
    left = [env.deck.suits_idx[env.deck.idx[: env.deck.deck_len]] for env in theirs]
    counts = torch.tensor([[int((suits <= suit).sum()) for suit in range(4)] for suits in left])
    saved = ours.state_dict()
    saved["state"]["deck"] = counts
    if isinstance(ours, RepeatPrevious):
        k = ours.settings["k"]
        hands = [env.deck.suits_idx[env.deck["player"]].tolist() for env in theirs]
        saved["state"]["recent"] = torch.tensor([([0] * k + hand)[-k:] for hand in hands]).T.contiguous()
    else:
        saved["state"]["first"] = torch.tensor([int(env.card) for env in theirs])
    ours.load_state_dict(saved)


def right_answer(env):
    if not hasattr(env, "k"):  # RepeatFirst
        return int(env.card)
    hand = env.deck["player"]
    return int(env.deck.suits_idx[hand[-env.k]]) if len(hand) >= env.k else 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["RepeatPrevious", "RepeatFirst"])
def test_card_games_give_popgyms_observations_rewards_and_ends(name, level, monkeypatch):
    ours, theirs = ours_and_popgyms(name, level)
    rng = np.random.default_rng(7)
    for index, env in enumerate(theirs):
        env.reset(seed=100 + index)
        for _ in range(9 * index):  # so that the episodes do not end together
            env.step(0)
    inject_popgym_hands(ours, theirs)

    ends = 0
    for _ in range(2 * theirs[0].max_episode_length):
        guesses = rng.integers(0, 4, NUM_ENVS)
        actions = np.where(rng.random(NUM_ENVS) < 0.5, [right_answer(env) for env in theirs], guesses)
        expected = step_popgym(theirs, actions)
        draws = draws_that_deal(ours, expected[0])
        monkeypatch.setattr(ours, "draw", lambda draws=draws: draws)
        assert_same_step(ours.step(torch.as_tensor(actions)), expected, rtol=0)
        ends += int(expected[2].sum())
    assert ends == 2 * NUM_ENVS


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["RepeatPrevious", "RepeatFirst", "PositionOnlyCartPole"])
def test_spaces_are_popgyms(name, level):
    ours, theirs = ours_and_popgyms(name, level)
    assert ours.single_observation_space == theirs[0].observation_space
    assert ours.single_action_space == theirs[0].action_space


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


# --- cart and pole -------------------------------------------------------------------------------------


def popgym_motion(envs):
    """[B, 4] in our order: positions first."""
    return torch.tensor(np.array([env.state for env in envs]))[:, [0, 2, 1, 3]]


def balancing_action(env):
    x, x_dot, angle, spin = env.state
    return int(0.05 * x + 0.1 * x_dot + angle + 0.3 * spin > 0)


@pytest.mark.parametrize("level", LEVELS)
def test_cartpole_gives_popgyms_observations_rewards_and_ends(level, monkeypatch):
    ours, theirs = ours_and_popgyms("PositionOnlyCartPole", level)
    rng = np.random.default_rng(3)
    for index, env in enumerate(theirs):
        env.reset(seed=index)
    monkeypatch.setattr(ours, "draw", lambda: popgym_motion(theirs))
    obs, _ = ours.reset()
    np.testing.assert_array_equal(obs.numpy(), popgym_motion(theirs)[:, :2].float().numpy())

    terminations = truncations = 0
    for _ in range(ours.settings["max_episode_length"] + 50):
        # Environment 0 balances to the time limit, the others act more or less at random and fall.
        chance = rng.random(NUM_ENVS)
        actions = [
            balancing_action(env) if chance[i] >= 0.4 * i else int(rng.integers(2)) for i, env in enumerate(theirs)
        ]
        # A balanced pole doubles rounding errors every nine steps, so each step starts from POPGym's numbers.
        ours.state = {**ours.state, "motion": popgym_motion(theirs)}
        expected = step_popgym(theirs, actions)
        assert_same_step(ours.step(torch.tensor(actions)), expected, rtol=1.2e-7)  # one unit of float32
        terminations += int(expected[2].sum())
        truncations += int(expected[3].sum())
    assert terminations > 0 and truncations > 0


def test_cartpole_moves_as_gymnasiums_over_200_random_steps(monkeypatch):
    theirs = [gym.make("CartPole-v1").unwrapped for _ in range(8)]
    for index, env in enumerate(theirs):
        env.reset(seed=index)
    ours = PositionOnlyCartPole(num_envs=8, max_episode_length=10_000)
    monkeypatch.setattr(ours, "draw", lambda: popgym_motion(theirs))
    ours.reset()
    actions = np.random.default_rng(0).integers(0, 2, (200, 8))
    for t in range(200):
        terminated = step_popgym(theirs, actions[t])[2]
        assert ours.step(actions[t])[2].tolist() == terminated.tolist()
        torch.testing.assert_close(ours.state["motion"], popgym_motion(theirs), rtol=0, atol=1e-12)


def test_cartpole_starts_within_5_hundredths():
    env = PositionOnlyCartPole(num_envs=10_000)
    env.reset(seed=0)
    start = env.state["motion"]
    assert start.abs().max() <= 0.05
    assert (start.mean(0).abs() < 0.002).all()
    assert torch.allclose(start.std(0), torch.tensor(0.1 / 12**0.5, dtype=torch.float64), rtol=0.05)
