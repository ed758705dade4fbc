"""Shuffled decks, stored as the number of cards left of each suit.

Dealing from a shuffled deck is the same as drawing at random from the cards that are left. The second needs four numbers
per environment instead of up to 832, no shuffle at reset, and one random number per card. The rules of the card tasks
are in `repeat_previous.py` and `repeat_first.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

CARDS_PER_DECK = 52
SUITS = 4
_DRAW_LIMIT = 1 << 62  # draws are below this, so the bias of the remainder is below 1e-15


def full_deck(num_decks: int, device: torch.device) -> Tensor:
    """[4]: entry j is the number of cards in suits 0 to j. The last entry is the size of the deck."""
    return torch.arange(1, SUITS + 1, device=device) * (num_decks * CARDS_PER_DECK // SUITS)


def draw_for_one_card(num_envs: int, generator: torch.Generator) -> Tensor:
    """[B, 1] int64 random numbers for `deal`."""
    return torch.randint(_DRAW_LIMIT, (num_envs, 1), generator=generator, device=generator.device)


def deal(deck: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Take one card from each deck [B, 4]. Returns its suit [B] and the deck without it."""
    place = draws % deck[:, -1:]  # [B, 1] the card's place if the remaining cards were sorted by suit
    passed = place >= deck  # [B, 4] True for the suits that end before it
    return passed.sum(-1), deck + passed - 1


def require_deck(deck: Tensor, full: Tensor) -> None:
    """ValueError unless every row [4] is what is left of a full deck."""
    per_suit = deck.diff(dim=-1, prepend=deck.new_zeros(len(deck), 1))
    if (per_suit < 0).any() or (per_suit > int(full[0])).any() or (deck[:, -1] < 1).any():
        raise ValueError("saved 'deck' is no part of a deck of cards")


def last_card(deck: Tensor) -> Tensor:
    """The suit [B] of the only card left. Meaningless in rows that have more cards."""
    return SUITS - deck.sum(-1)
