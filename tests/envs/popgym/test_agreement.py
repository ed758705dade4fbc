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


class NoisyCartPoleFeed(CartPoleFeed):
    def prepare(self, theirs):
        theirs.np_random = Recorder(theirs.np_random)

    def before(self, ours, theirs, actions):
        super().before(ours, theirs, actions)
        for env in theirs:
            env.np_random.calls.clear()

    def draws(self, ours, theirs, obs):
        return torch.cat([self.motion(theirs), noise(theirs)], 1)


class BanditFeed(Feed):
    ends = frozenset({"truncated"})

    def prepare(self, theirs):
        theirs.np_random = Recorder(theirs.np_random)

    def before(self, ours, theirs, actions):
        self.chances = [env.bandits[action] for env, action in zip(theirs, actions)]
        for env in theirs:
            env.np_random.calls.clear()

    def draws(self, ours, theirs, obs):
        if ours.state is None or not hasattr(self, "chances"):  # nothing is drawn at the first reset
            return torch.zeros(ours.num_envs, 2)
        payouts = [env.np_random.calls.get("random", [0.0])[0] for env in theirs]
        return torch.tensor(np.stack([self.chances, payouts], 1), dtype=torch.float32)

    def good_action(self, theirs):
        return int(theirs.bandits.argmax())


FEEDS = {
    "RepeatFirst": RepeatFirstFeed,
    "RepeatPrevious": RepeatPreviousFeed,
    "PositionOnlyCartPole": CartPoleFeed,
    "NoisyPositionOnlyCartPole": NoisyCartPoleFeed,
    "VelocityOnlyCartPole": CartPoleFeed,
    "MultiarmedBandit": BanditFeed,
    "HigherLower": HigherLowerFeed,
}
TASKS = [(name, level) for name in FEEDS for level in LEVELS]


@pytest.mark.parametrize(("name", "level"), TASKS)
def test_observations_rewards_and_ends_are_popgyms(name, level):
    feed = FEEDS[name]()
    seed = TASKS.index((name, level))
    play_both(name, level, feed, steps=STEPS, seed=seed)


@pytest.mark.parametrize(("name", "level"), TASKS)
def test_spaces_are_popgyms(name, level):
    ours, theirs = make_pair(name, level)
    assert ours.single_observation_space == theirs[0].observation_space
    assert ours.single_action_space == theirs[0].action_space
