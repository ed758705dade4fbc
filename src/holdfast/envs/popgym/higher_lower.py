"""HigherLower: guess whether the next card is higher or lower than the last one.

The rules are those of POPGym's environment of the same name. A shuffled deck is dealt card by card. A right guess gives
1 / cards, a wrong one -1 / cards, a card of the same rank 0. Counting the cards that are gone improves the guess. An episode
has cards - 1 steps and ends `terminated`.
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import CARDS_PER_DECK, NAMES, RANKS, deal, draw_for_one_card, full_deck, last_card

HIGHER, LOWER = 0, 1


class HigherLower(TorchVectorEnv):
    """Observation: the rank just dealt, 0 (ace) to 12 (king). Action: higher (0) or lower (1)."""

    can_truncate = False
    render_modes = ("ansi",)

    def __init__(
        self,
        num_envs: int,
        num_decks: int = 1,
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
    ) -> None:
        if num_decks < 1:
            raise ValueError(f"num_decks is {num_decks}; expected at least 1")
        settings = {"num_decks": num_decks}
        super().__init__(num_envs, Discrete(RANKS), Discrete(2), settings, device, render_mode)
        self._full = full_deck(num_decks, self.device, RANKS)
        reward = 1 / (num_decks * CARDS_PER_DECK)
        self._reward = torch.tensor([reward, -reward], dtype=torch.float32, device=self.device)  # of a higher card

    def draw(self) -> Tensor:
        return draw_for_one_card(self.num_envs, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        rank, deck = deal(self._full.repeat(self.num_envs, 1), draws)
        return {"deck": deck, "rank": rank.clone()}, rank

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        deck = state["deck"]  # [B, 13]

        # The last card of a deck is not random, so the draw of that step is used for the first card of the next deck.
        terminated = deck[:, -1] == 1
        rank, next_deck = deal(torch.where(terminated.unsqueeze(1), self._full, deck), draws)
        dealt = torch.where(terminated, last_card(deck), rank)
        return Transition(
            state={"deck": next_deck, "rank": rank.clone()},
            obs=rank,
            rewards=(dealt - state["rank"]).sign() * self._reward.index_select(0, actions),
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            done=terminated,
            final_obs=dealt,
        )

    def text(self, row: int) -> str:
        assert self.state is not None
        return NAMES["ranks"][int(self.state["rank"][row])]
