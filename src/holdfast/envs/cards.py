"""Shuffled decks, stored as the number of cards left of each kind: of each suit, rank or color.

Dealing from a shuffled deck is the same as drawing at random from the cards that are left. The second needs a number per
kind instead of up to 832 cards, no shuffle at reset, and one random number per card. The rules of the card tasks are in
files of their own, `repeat_previous.py` for example.
"""

from __future__ import annotations

import torch
from torch import Tensor

CARDS_PER_DECK = 52
SUITS, RANKS, COLORS = 4, 13, 2
KINDS = {"colors": COLORS, "suits": SUITS, "ranks": RANKS}
"""How many kinds of cards there are, by what makes a kind."""
NAMES = {"colors": ("b", "r"), "suits": tuple("♠♦♣♥"), "ranks": ("A", *map(str, range(2, 11)), "J", "Q", "K")}
"""The kinds in letters."""
_DRAW_LIMIT = 1 << 62  # draws are below this, so the bias of the remainder is below 1e-15


def full_deck(num_decks: int, device: torch.device, kinds: int = SUITS) -> Tensor:
    """[kinds]: entry j is the number of cards of kinds 0 to j. The last entry is the size of the deck."""
    return torch.arange(1, kinds + 1, device=device) * (num_decks * CARDS_PER_DECK // kinds)


def draw_for_one_card(num_envs: int, generator: torch.Generator) -> Tensor:
    """[B, 1] int64 random numbers for `deal`."""
    return draw_for_cards(num_envs, 1, generator)


def draw_for_cards(num_envs: int, cards: int, generator: torch.Generator) -> Tensor:
    """[B, cards] int64 random numbers, below 2^62."""
    return torch.randint(_DRAW_LIMIT, (num_envs, cards), generator=generator, device=generator.device)


def deal(deck: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Take one card from each deck [..., kinds], with draws [..., 1]. Returns its kind [...] and the deck without it."""
    place = draws % deck[..., -1:]  # the card's place if the remaining cards were sorted by kind
    passed = place >= deck  # True for the kinds that end before it
    return passed.sum(-1), deck + passed - 1


def require_deck(deck: Tensor, full: Tensor) -> None:
    """ValueError unless every row [4] is what is left of a full deck."""
    per_suit = deck.diff(dim=-1, prepend=deck.new_zeros(len(deck), 1))
    if (per_suit < 0).any() or (per_suit > int(full[0])).any() or (deck[:, -1] < 1).any():
        raise ValueError("saved 'deck' is not a valid deck of cards")


def last_card(deck: Tensor) -> Tensor:
    """The kind [...] of the only card left. Meaningless in decks that have more cards."""
    return deck.shape[-1] - deck.sum(-1)
