"""RepeatFirst: name the suit of the first card of the episode, at every step.

The rules are those of POPGym's environment of the same name. A shuffled deck is dealt card by card. Each answer gives
+1 / (cards - 1) or -1 / (cards - 1), so a perfect episode returns 1 and guessing returns -0.5 on average. An episode
has cards - 1 steps and ends `terminated`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import CARDS_PER_DECK, SUITS, deal, draw_for_one_card, full_deck, last_card, require_deck


class RepeatFirst(TorchVectorEnv):
    """Observation: the suit just dealt. Action: a suit."""

    can_truncate = False
    inputs = ("obs", "prev_action")

    def __init__(self, num_envs: int, num_decks: int = 1, device: torch.device | str = "cpu") -> None:
        if num_decks < 1:
            raise ValueError(f"num_decks is {num_decks}; expected at least 1")
        super().__init__(num_envs, Discrete(SUITS), Discrete(SUITS), {"num_decks": num_decks}, device)
        self._full = full_deck(num_decks, self.device)
        num_cards = num_decks * CARDS_PER_DECK
        self._reward = torch.tensor(1 / (num_cards - 1), dtype=torch.float32, device=self.device)
        self._penalty = -self._reward

    def draw(self) -> Tensor:
        return draw_for_one_card(self.num_envs, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        suit, deck = deal(self._full.repeat(self.num_envs, 1), draws)
        return {"deck": deck, "first": suit.clone()}, suit

    def require_possible(self, saved: Mapping[str, Tensor]) -> None:
        require_deck(saved["deck"], self._full.cpu())

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        deck, first = state["deck"], state["first"]  # [B, 4], [B]
        rewards = torch.where(actions == first, self._reward, self._penalty)

        # The last card of a deck is not random, so the draw of that step is used for the first card of the next deck.
        terminated = deck[:, -1] == 1
        suit, next_deck = deal(torch.where(terminated.unsqueeze(1), self._full, deck), draws)
        return Transition(
            state={"deck": next_deck, "first": torch.where(terminated, suit, first)},
            obs=suit,
            rewards=rewards,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            done=terminated,
            final_obs=torch.where(terminated, last_card(deck), suit),
        )
