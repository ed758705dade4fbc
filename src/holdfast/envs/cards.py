"""A shuffled deck without the deck: cards are drawn from the number of each suit that is left.

Dealing from a shuffled deck and drawing at random from what is left are the same thing, and the second
needs four numbers per environment instead of up to 832, no shuffle at reset, and one random number per
card.
"""

from __future__ import annotations

import torch
from torch import Tensor

CARDS_PER_DECK = 52
SUITS = 4
_LARGE = 1 << 62  # draws lie below this; the remainder's bias is then below 1e-15


def full_deck(num_decks: int, device: torch.device) -> Tensor:
    """[4]: entry j is the number of cards of the suits 0 to j; the last one is the size of the deck."""
    return torch.arange(1, SUITS + 1, device=device) * (num_decks * CARDS_PER_DECK // SUITS)


def draw_for_one_card(num_envs: int, generator: torch.Generator) -> Tensor:
    """[B, 1] int64 random numbers for `deal`."""
    return torch.randint(_LARGE, (num_envs, 1), generator=generator, device=generator.device)


def deal(deck: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Take one card from each deck [B, 4]: its suit [B] and the deck without it."""
    place = draws % deck[:, -1:]  # [B, 1] of the card, were those left sorted by suit
    passed = place >= deck  # [B, 4] the suits that end before it
    return passed.sum(-1), deck + passed - 1


def last_card(deck: Tensor) -> Tensor:
    """The suit [B] of the only card left; rows with more cards give nothing of use."""
    return SUITS - deck.sum(-1)
