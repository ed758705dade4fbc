"""Autoencode: watch a deck being dealt, then name its suits in reverse order.

The rules are those of POPGym's environment of the same name. The deck is dealt card by card; then the suits are asked for,
the last one first. A right answer gives 1 / cards, a wrong one -1 / cards. An episode has 2 x cards - 1 steps and ends
`terminated`.
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Discrete, Tuple
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import CARDS_PER_DECK, SUITS, deal, draw_for_one_card, full_deck

PLAY, WATCH = 0, 1


class Autoencode(TorchVectorEnv):
    """Observation: (watch 1 or play 0, the suit just dealt or 0). The last card is shown with play. Action: a suit."""

    can_truncate = False

    def __init__(self, num_envs: int, num_decks: int = 1, device: torch.device | str = "cpu") -> None:
        if num_decks < 1:
            raise ValueError(f"num_decks is {num_decks}; expected at least 1")
        seen = Tuple((Discrete(2), Discrete(SUITS)))
        super().__init__(num_envs, seen, Discrete(SUITS), {"num_decks": num_decks}, device)
        self._num_cards = num_decks * CARDS_PER_DECK
        self._full = full_deck(num_decks, self.device)
        self._reward = torch.tensor(1 / self._num_cards, dtype=torch.float32, device=self.device)
        self._penalty = -self._reward

    def draw(self) -> Tensor:
        return draw_for_one_card(self.num_envs, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, tuple[Tensor, Tensor]]:
        suit, deck = deal(self._full.repeat(self.num_envs, 1), draws)
        later = torch.zeros(self.num_envs, self._num_cards - 1, dtype=torch.uint8, device=self.device)
        cards = torch.cat((suit.to(torch.uint8).unsqueeze(1), later), 1)
        state = {"deck": deck, "cards": cards, "steps": torch.zeros_like(suit)}
        return state, (torch.full_like(suit, WATCH), suit)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        cards, steps = state["cards"], state["steps"]  # [B, cards] in the order they were dealt, [B]
        last_step = 2 * self._num_cards - 2
        watching = steps < self._num_cards - 1
        terminated = steps == last_step

        # The place of the card that this step deals, or asks for. The last one asked for has place 0, which is also the
        # place of the first card of the next episode.
        place = torch.where(watching, steps + 1, last_step - steps).unsqueeze(1)
        stored = cards.gather(1, place).squeeze(1)
        answer = torch.where(actions == stored, self._reward, self._penalty)

        # While playing, the deck is empty and a full one is kept ready for the next episode.
        suit, deck = deal(torch.where(watching.unsqueeze(1), state["deck"], self._full), draws)
        dealt = watching | terminated
        card = torch.where(dealt, suit, stored).to(torch.uint8)
        mode = steps < self._num_cards - 2
        return Transition(
            state={
                "deck": deck,
                "cards": cards.scatter(1, place, card.unsqueeze(1)),
                "steps": (steps + 1).masked_fill(terminated, 0),
            },
            obs=((mode | terminated).long(), suit * dealt),
            rewards=answer.masked_fill(watching, 0.0),
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            done=terminated,
            final_obs=(mode.long(), suit * watching),
        )
