"""All of POPGym's tasks, ours and its own: the same actions and random choices give the same results, step by step.

HOLDFAST_AGREEMENT_ROUNDS=20 plays twenty times as long.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from popgym_pairs import LEVELS, STEPS, Feed, Recorder, make_pair, play_both

pytest.importorskip("popgym.envs")


def draws_that_deal(deck, kinds):
    """Random numbers [B, 1] with which the next card of each deck [B, kinds] is of the given kind [B], if one is left."""
    return deck.gather(1, torch.as_tensor(kinds).unsqueeze(1)) - 1


class CardsFeed(Feed):
    """One deck; the observation is the card just dealt."""

    def draws(self, ours, theirs, obs):
        deck = self.deck(ours)
        return draws_that_deal(deck, obs)

    def deck(self, ours):
        full = ours._full.expand(ours.num_envs, -1)
        if ours.state is None:
            return full
        deck = ours.state["deck"]
        return torch.where(deck[:, -1:] == 1, full, deck)


class RepeatFirstFeed(CardsFeed):
    def good_action(self, theirs):
        return int(theirs.card)


class RepeatPreviousFeed(CardsFeed):
    def good_action(self, theirs):
        hand = theirs.deck["player"]
        return int(theirs.deck.suits_idx[hand[-theirs.k]]) if len(hand) >= theirs.k else 0


class HigherLowerFeed(CardsFeed):
    def good_action(self, theirs):
        deck, shown = theirs.deck, theirs.deck.show("player", ["ranks_idx"]).item()
        left = deck.ranks_idx[deck.idx[: deck.deck_len]]
        return int((left > shown).sum() < (left < shown).sum())


class CartPoleFeed(Feed):
    """Each step starts from POPGym's motion: a balanced pole doubles rounding errors every nine steps."""

    ends = frozenset({"terminated", "truncated"})
    rtol = 1.2e-7  # one unit of float32

    def before(self, ours, theirs, actions):
        ours.state = {**ours.state, "motion": self.motion(theirs)}

    def motion(self, theirs):
        """[B, 4] in our order: positions first."""
        return torch.tensor(np.array([env.state for env in theirs]))[:, [0, 2, 1, 3]].contiguous()

    def draws(self, ours, theirs, obs):
        return self.motion(theirs)

    def good_action(self, theirs):
        x, x_dot, angle, spin = theirs.state
        return int(0.05 * x + 0.1 * x_dot + angle + 0.3 * spin > 0)


def noise(theirs):
    """[B, 4]: POPGym's noise on the first observation of the new episode, if one began, and on the step before it."""
    calls = [env.np_random.calls.get("normal", [np.zeros(2)]) for env in theirs]
    return torch.tensor(np.array([np.concatenate([call[-1], call[0]]) for call in calls]))


class NoiseFeed(Feed):
    """POPGym's noise, after the motion that the class next to it feeds."""

    def prepare(self, theirs):
        theirs.np_random = Recorder(theirs.np_random)

    def before(self, ours, theirs, actions):
        super().before(ours, theirs, actions)
        for env in theirs:
            env.np_random.calls.clear()

    def draws(self, ours, theirs, obs):
        return torch.cat([self.motion(theirs), noise(theirs)], 1)


class NoisyCartPoleFeed(NoiseFeed, CartPoleFeed):
    pass


class BanditFeed(Feed):
    ends = frozenset({"truncated"})

    def prepare(self, theirs):
        theirs.np_random = Recorder(theirs.np_random)

    def before(self, ours, theirs, actions):
        # An arm that was pulled before has its chance; what is drawn for it must not matter.
        known = ours.state["chances"].gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1) >= 0
        self.chances = [
            1 - env.bandits[action] if old else env.bandits[action] for env, action, old in zip(theirs, actions, known)
        ]
        for env in theirs:
            env.np_random.calls.clear()

    def draws(self, ours, theirs, obs):
        if ours.state is None or not hasattr(self, "chances"):  # nothing is drawn at the first reset
            return torch.zeros(ours.num_envs, 2)
        payouts = [env.np_random.calls.get("random", [0.0])[0] for env in theirs]
        return torch.tensor(np.stack([self.chances, payouts], 1), dtype=torch.float32)

    def good_action(self, theirs):
        return int(theirs.bandits.argmax())


class PendulumFeed(Feed):
    """Each step starts from POPGym's motion, as CartPole's does."""

    ends = frozenset({"truncated"})
    rtol = 1.2e-7

    def before(self, ours, theirs, actions):
        ours.state = {**ours.state, "motion": self.motion(theirs)}

    def motion(self, theirs):
        return torch.tensor(np.array([env.state for env in theirs]))

    def draws(self, ours, theirs, obs):
        return self.motion(theirs)

    def good_action(self, theirs):
        angle, spin = theirs.state
        angle = (angle + np.pi) % (2 * np.pi) - np.pi
        torque = -10 * angle - 3 * spin if abs(angle) < 0.6 else 2 * np.sign(spin)
        return np.array([torque], np.float32)  # often beyond the limits, which clips it


class NoisyPendulumFeed(NoiseFeed, PendulumFeed):
    pass


class AutoencodeFeed(Feed):
    def draws(self, ours, theirs, obs):
        full = ours._full.expand(ours.num_envs, -1)
        if ours.state is None:
            deck = full
        else:
            deck = torch.where((ours.state["steps"] < ours._num_cards - 1).unsqueeze(1), ours.state["deck"], full)
        return draws_that_deal(deck, [suit for _, suit in obs])

    def good_action(self, theirs):
        return int(theirs.deck.suits_idx[theirs.deck["system"][-1]])


class CountRecallFeed(Feed):
    def draws(self, ours, theirs, obs):
        full = ours._full.expand(ours.num_envs, 2, -1)
        decks = full if ours.state is None else ours.state["decks"]
        decks = torch.where(decks[:, :, -1:] == 1, full, decks)
        kinds = torch.as_tensor(np.array(obs))
        return torch.cat([draws_that_deal(decks[:, i], kinds[:, i]) for i in range(2)], 1)

    def good_action(self, theirs):
        return int(theirs.counts[theirs.query])


class ConcentrationFeed(Feed):
    ends = frozenset({"terminated", "truncated"})

    def before(self, ours, theirs, actions):
        self.kinds = [int(env.state[action]) for env, action in zip(theirs, actions)]

    def draws(self, ours, theirs, obs):
        if ours.state is None:  # nothing is drawn at a reset
            return torch.zeros(ours.num_envs, 1, dtype=torch.int64)
        return draws_that_deal(ours.state["deck"], self.kinds).clamp_min(0)  # known cards may be gone from the deck

    def good_action(self, theirs):
        up, in_play = theirs.deck["face_up_idx"], theirs.deck["in_play_idx"]
        down = [card for card in range(theirs.deck.num_cards) if card not in up and card not in in_play]
        if in_play and len(in_play) == 1:
            down = [card for card in down if theirs.state[card] == theirs.state[in_play[0]]] or down
        return down[0] if down else 0


def board_of(ours, row):
    """Our ships in one environment as rows of 0 and 1. The columns must say the same as the rows."""
    size, lines = ours.settings["board_size"], ours.state["ships"][row].tolist()
    cells = [[line >> bit & 1 for bit in range(size)] for line in lines]
    assert cells[:size] == [list(column) for column in zip(*cells[size:])]
    return cells[:size]


class BattleshipFeed(Feed):
    we_choose = True
    ends = frozenset({"terminated", "truncated"})

    def start_theirs(self, ours, row, theirs):
        theirs.board = np.array(board_of(ours, row), np.int8)
        assert theirs.board.sum() == theirs.needed_hits

    def good_action(self, theirs):
        return np.argwhere((theirs.board == 1) & (theirs.guesses == 0))[0]


class MineSweeperFeed(Feed):
    we_choose = True
    ends = frozenset({"terminated", "truncated"})

    def start_theirs(self, ours, row, theirs):
        """POPGym resets once more, and its choice of mines is ours."""
        mines = int(ours.state["mines"][row])
        squares = [square for square in range(theirs.dims[0] * theirs.dims[1]) if mines >> square & 1]
        assert len(squares) == theirs.num_mines
        generator = theirs.np_random
        theirs.np_random = ChoosesMines(squares)
        theirs.reset()
        theirs.np_random = generator

    def good_action(self, theirs):
        return np.argwhere(theirs.hidden_grid == 0)[0]


class ChoosesMines:
    def __init__(self, squares):
        self.squares = squares

    def choice(self, *args, **kwargs):
        return np.array(self.squares)


class LabyrinthFeed(Feed):
    """POPGym's mazes take the place of those in our pool, one after another."""

    ends = frozenset({"terminated", "truncated"})
    least_steps = 1050  # an episode has up to 1023

    def __init__(self):
        self.walls, self.mazes, self.places = None, {}, {}

    def draws(self, ours, theirs, obs):
        if self.walls is None:
            self.walls = torch.ones(64, ours._size**2, dtype=torch.bool)
        numbers = []
        for row, env in enumerate(theirs):
            if self.mazes.get(row) is not env.maze:  # a new episode: the old maze stays, for the last observation in it
                self.mazes[row] = env.maze
                self.places[row] = row + len(theirs) * ((self.places.get(row, 0) // len(theirs) + 1) % 16)
                self.walls[self.places[row]] = torch.as_tensor(env.maze.grid != 0).flatten()
            start, end = (y * ours._size + x for y, x in (env.maze.start, env.maze.end))
            (gate,) = ((ours._starts == start) & (ours._exits == end)).nonzero().flatten().tolist()
            numbers.append(self.places[row] * len(ours._starts) + gate)
        ours._set_mazes(self.walls)
        return torch.tensor(numbers).unsqueeze(1)

    def wanted(self, theirs):
        """Where a good player wants to go."""
        return np.argwhere(theirs.maze.grid == 3)

    def good_action(self, theirs):
        """The first step of a shortest way to a wanted cell."""
        wanted, first = {tuple(cell) for cell in self.wanted(theirs).tolist()}, {theirs.position: 0}
        queue, here = [theirs.position], theirs.position
        for cell in queue:
            if cell in wanted:
                return first[cell]
            for action in range(4):
                theirs.position = cell
                there = theirs.move(action)
                if there not in first:
                    first[there] = first[cell] if cell != here else action
                    queue.append(there)
            theirs.position = here
        return 0


class LabyrinthExploreFeed(LabyrinthFeed):
    def wanted(self, theirs):
        return np.argwhere((theirs.maze.grid == 0) & (theirs.explored == 0))


FEEDS = {
    "RepeatFirst": RepeatFirstFeed,
    "RepeatPrevious": RepeatPreviousFeed,
    "PositionOnlyCartPole": CartPoleFeed,
    "NoisyPositionOnlyCartPole": NoisyCartPoleFeed,
    "VelocityOnlyCartPole": CartPoleFeed,
    "PositionOnlyPendulum": PendulumFeed,
    "NoisyPositionOnlyPendulum": NoisyPendulumFeed,
    "MultiarmedBandit": BanditFeed,
    "HigherLower": HigherLowerFeed,
    "Autoencode": AutoencodeFeed,
    "CountRecall": CountRecallFeed,
    "Concentration": ConcentrationFeed,
    "Battleship": BattleshipFeed,
    "MineSweeper": MineSweeperFeed,
    "LabyrinthEscape": LabyrinthFeed,
    "LabyrinthExplore": LabyrinthExploreFeed,
}
TASKS = [(name, level) for name in FEEDS for level in LEVELS]


@pytest.fixture(autouse=True)
def mazelib(request):
    """POPGym has the labyrinths only where mazelib is installed."""
    if "Labyrinth" in request.node.name:
        pytest.importorskip("mazelib")


@pytest.mark.parametrize(("name", "level"), TASKS)
def test_observations_rewards_and_ends_are_popgyms(name, level):
    feed = FEEDS[name]()
    seed = TASKS.index((name, level))
    play_both(name, level, feed, steps=max(STEPS, feed.least_steps), seed=seed)


@pytest.mark.parametrize(("name", "level"), TASKS)
def test_spaces_are_popgyms(name, level):
    ours, theirs = make_pair(name, level)
    assert ours.single_observation_space == theirs[0].observation_space
    assert ours.single_action_space == theirs[0].action_space
