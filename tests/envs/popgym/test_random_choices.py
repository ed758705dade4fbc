"""What our environments draw themselves is distributed as in POPGym.

`test_agreement.py` gives both sides the same choices; here ours are tested against the law of POPGym's. Chi-square tests use
40,000 to 60,000 samples and a false alarm rate of 1e-6. They notice a choice among k that is off by a relative d in half of
the cases if samples * d^2 is about 5 * sqrt(2 k) + 11: with 40,000 samples and 36 cases, 3.6%.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from holdfast.envs import (
    Autoencode,
    Battleship,
    Concentration,
    CountRecall,
    HigherLower,
    MineSweeper,
    MultiarmedBandit,
    NoisyPositionOnlyCartPole,
    NoisyPositionOnlyPendulum,
    PositionOnlyPendulum,
)


def assert_frequencies(codes, probabilities):
    """`codes` [samples] are numbers of cases, each as likely as `probabilities` says."""
    expected = torch.as_tensor(probabilities, dtype=torch.float64) * len(codes)
    assert expected.min() > 30  # for the normal approximation
    counts = torch.bincount(codes, minlength=len(expected)).double()
    assert len(counts) == len(expected)
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    # Wilson-Hilferty: the cube root of chi-square / freedom is nearly normal; 4.75 sigma is one in a million.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.75, f"chi-square {statistic:.1f} for {freedom} degrees of freedom"


def two_cards(kinds, cards):
    """[kinds * kinds]: how likely two cards of a shuffled deck are."""
    each = cards // kinds
    same = torch.eye(kinds, dtype=torch.float64).flatten()
    return (each * each - each * same) / (cards * (cards - 1))


# --- cards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_come_as_from_a_shuffled_deck(seed):
    env = HigherLower(60_000)
    first = env.reset(seed=seed)[0]
    second = env.step(torch.zeros_like(first))[0]
    assert_frequencies(first * 13 + second, two_cards(13, 52))


@pytest.mark.parametrize(("deck_type", "kinds"), [("colors", 2), ("suits", 4), ("ranks", 13)])
def test_both_decks_of_count_recall_are_shuffled_and_independent(deck_type, kinds):
    env = CountRecall(60_000, num_decks=2, deck_type=deck_type)
    first = env.reset(seed=kinds)[0]
    assert_frequencies(first[:, 0] * kinds + first[:, 1], torch.full((kinds**2,), 1 / kinds**2))
    second = env.step(torch.zeros(60_000, dtype=torch.int64))[0]
    for deck in range(2):
        assert_frequencies(first[:, deck] * kinds + second[:, deck], two_cards(kinds, 104))


def test_a_whole_deck_is_watched_in_autoencode():
    env = Autoencode(64, num_decks=2)
    (mode, suit), _ = env.reset(seed=1)
    seen = [suit]
    for _ in range(103):
        assert mode.eq(1).all()
        (mode, suit), *_ = env.step(torch.zeros(64, dtype=torch.int64))
        seen.append(suit)
    assert mode.eq(0).all()  # the last card is shown with play
    assert (torch.nn.functional.one_hot(torch.stack(seen), 4).sum(0) == 26).all()


@pytest.mark.parametrize(("deck_type", "kinds", "decks"), [("colors", 2, 1), ("colors", 2, 2), ("ranks", 13, 1)])
def test_cards_turned_in_concentration_come_as_from_a_shuffled_deck(deck_type, kinds, decks):
    env = Concentration(60_000, num_decks=decks, deck_type=deck_type)
    env.reset(seed=decks)
    places = torch.rand(60_000, 52 * decks).argsort(1)[:, :2]
    env.step(places[:, 0])
    _, _, _, _, info = env.step(places[:, 1])
    kinds_seen = info["final_obs"].gather(1, places)
    assert_frequencies(kinds_seen[:, 0] * kinds + kinds_seen[:, 1], two_cards(kinds, 52 * decks))


def test_all_cards_of_concentration_turned_once_are_a_deck():
    env = Concentration(64, deck_type="ranks")
    env.reset(seed=2)
    order = torch.rand(64, 52).argsort(1)
    seen = []
    for t in range(52):  # pairs may be found, so some cards stay up; each is turned once
        _, _, terminated, truncated, info = env.step(order[:, t])
        assert not (terminated | truncated).any()
        seen.append(info["final_obs"].gather(1, order[:, t : t + 1]).squeeze(1))
    assert (torch.nn.functional.one_hot(torch.stack(seen), 13).sum(0) == 4).all()


# --- boards --------------------------------------------------------------------------------------------


def boards_after_an_episode(env, actions):
    """The state after every environment has finished exactly one episode with `actions` [T, B, 2]."""
    for row in actions:
        _, _, terminated, truncated, _ = env.step(row)
    assert (terminated | truncated).all()
    return env.state


def test_every_set_of_mines_is_equally_likely():
    env = MineSweeper(40_000, board_size=3, num_mines=2)
    codes = {1 << a | 1 << b: i for i, (a, b) in enumerate(itertools.combinations(range(9), 2))}
    lookup = torch.zeros(1 << 9, dtype=torch.int64)
    for bits, code in codes.items():
        lookup[bits] = code
    uniform = torch.full((36,), 1 / 36)
    env.reset(seed=3)
    assert_frequencies(lookup[env.state["mines"]], uniform)
    mine = torch.stack([env.state["mines"] >> square & 1 for square in range(9)], 1).argmax(1)
    state = boards_after_an_episode(env, torch.stack([mine // 3, mine % 3], 1).unsqueeze(0))
    assert_frequencies(lookup[state["mines"]], uniform)


def ship_laws(size, ships):
    """All boards that placing ships one after another can give, as tuples of cells, and how likely each is."""
    boards = {(): 1.0}
    for length in ships:
        line = range(size - length + 1)
        places = [tuple((r, c + i) for i in range(length)) for r in range(size) for c in line]
        places += [tuple((r + i, c) for i in range(length)) for r in line for c in range(size)]
        grown = {}
        for board, probability in boards.items():
            free = [place for place in places if not set(place) & set(board)]
            for place in free:
                cells = tuple(sorted({*board, *place}))
                grown[cells] = grown.get(cells, 0.0) + probability / len(free)
        boards = grown
    return boards


@pytest.mark.parametrize("ships", [(2, 3), (3, 2, 1)])
def test_ships_are_placed_one_after_another_among_the_free_places(ships):
    size, law = 4, ship_laws(4, ships)
    likely = {board: i for i, board in enumerate(board for board, p in law.items() if p * 60_000 > 40)}
    rare = len(likely)  # all others together
    probabilities = [p for board, p in law.items() if board in likely]
    if rare < len(law):
        probabilities.append(1 - sum(probabilities))

    def codes(state):
        cells = torch.stack([state["ships"][:, :size] >> column & 1 for column in range(size)], 2)  # [B, row, column]
        flat, result = cells.flatten(1).tolist(), []
        for row in flat:
            board = tuple(divmod(i, size) for i, taken in enumerate(row) if taken)
            assert board in law
            result.append(likely.get(board, rare))
        return torch.tensor(result)

    env = Battleship(60_000, board_size=size, ship_sizes=ships)
    env.reset(seed=sum(ships))
    first = codes(env.state)
    assert_frequencies(first, probabilities)
    # Wait at one cell until the time limit: the next board was placed during the episode.
    corner = torch.zeros(size**2, 60_000, 2, dtype=torch.int64)
    second = codes(boards_after_an_episode(env, corner))
    assert_frequencies(second, probabilities)
    same = (first == second).float().mean().item()
    expected = sum(p * p for p in probabilities)
    assert abs(same - expected) < 5 * math.sqrt(expected / 60_000)  # independent of the board before


# --- floats --------------------------------------------------------------------------------------------


def test_every_arm_has_a_uniform_chance_that_lasts_an_episode():
    env = MultiarmedBandit(40_000, num_bandits=3, episode_length=300)
    env.reset(seed=1)
    arm = torch.arange(40_000) % 3
    paid = torch.stack([env.step(arm)[0] for _ in range(299)]).double()
    chances = env.state["chances"].gather(1, arm.unsqueeze(1)).squeeze(1).double()
    assert_frequencies((chances * 20).long(), torch.full((20,), 1 / 20))
    # Pulls are independent, each with that chance: the standardized sum has mean 0 and variance 1.
    z = (paid.sum(0) - 299 * chances) / (299 * chances * (1 - chances)).sqrt()
    z = z[(chances > 0.02) & (chances < 0.98)]
    assert abs(z.mean().item()) < 5 / math.sqrt(len(z)) and abs(z.var().item() - 1) < 0.05
    before = chances
    env.step(arm), env.step(arm)  # the second one pulls in a new episode
    after = env.state["chances"].gather(1, arm.unsqueeze(1)).squeeze(1).double()
    assert abs(torch.corrcoef(torch.stack([before, after]))[0, 1].item()) < 0.025
    assert (env.state["chances"] < 0).sum(1).eq(2).all()  # the other arms have not been pulled yet


@pytest.mark.parametrize("make", [NoisyPositionOnlyCartPole, NoisyPositionOnlyPendulum])
@pytest.mark.parametrize("sigma", [0.1, 0.3])
def test_noise_is_normal_and_new_in_every_observation(make, sigma):
    env = make(40_000, noise_sigma=sigma)
    env.generator.manual_seed(5)
    noise = env.draw()[:, -4:]  # two numbers for the first observation, two for the next one
    inside = [0.1587, 0.3413, 0.3413, 0.1587]  # below -sigma, below 0, below sigma, above
    for column in noise.T.contiguous():
        assert_frequencies(torch.bucketize(column, torch.tensor([-sigma, 0, sigma], dtype=column.dtype)), inside)
    correlation = torch.corrcoef(noise.T) - torch.eye(4)
    assert correlation.abs().max() < 0.025
    assert torch.corrcoef(torch.stack([noise[:, 0], env.draw()[:, -4]]))[0, 1].abs() < 0.025


def test_a_pendulum_starts_anywhere_with_a_spin_of_up_to_1():
    env = PositionOnlyPendulum(40_000)
    env.reset(seed=4)
    angle, spin = env.state["motion"].unbind(1)
    codes = ((angle / math.pi + 1) * 4).long() * 8 + ((spin + 1) * 4).long()
    assert_frequencies(codes, torch.full((64,), 1 / 64))
