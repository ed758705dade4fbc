"""Concentration: turn up two cards at a time and find the pairs.

The rules are those of POPGym's environment of the same name. All cards of a deck lie face down. Every second step ends a
try: two cards of a kind stay face up and give 2 / cards, others are turned down again and give -2 / episode_length. Choosing
a card that is face up already ends the try at once and gives -1 / episode_length per card chosen in it. The episode is
`terminated` when all cards are face up and `truncated` at its time limit. Both can be true at once.

What a card shows is drawn when it is first turned, from the cards not seen yet. That is the same game as shuffling first and
needs one random number per step.
"""

from __future__ import annotations

import math

import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import CARDS_PER_DECK, KINDS, deal, draw_for_one_card, full_deck

NO_CARD = -1


class Concentration(TorchVectorEnv):
    """Observation: the kind of each card, the number of kinds if it is face down. Action: the card to turn.

    `deck_type` says what makes a pair: "colors" or "ranks".
    """

    def __init__(
        self, num_envs: int, num_decks: int = 1, deck_type: str = "ranks", device: torch.device | str = "cpu"
    ) -> None:
        if num_decks < 1 or deck_type not in ("colors", "ranks"):
            raise ValueError(
                f"num_decks is {num_decks} and deck_type is {deck_type!r}; expected at least one deck "
                "and colors or ranks"
            )
        self._num_cards, self._face_down = num_decks * CARDS_PER_DECK, KINDS[deck_type]
        seen = MultiDiscrete([self._face_down + 1] * self._num_cards)
        settings = {"num_decks": num_decks, "deck_type": deck_type}
        super().__init__(num_envs, seen, Discrete(self._num_cards), settings, device)
        n = self._num_cards
        self._time_limit = math.ceil(2 * n - n / (2 * n - 1))
        self._full = full_deck(num_decks, self.device, self._face_down)
        penalty = -1 / self._time_limit
        # Of a first card, of one that was face up, of a second card that does not fit, of a pair.
        self._rewards = torch.tensor([0.0, penalty, 2 * penalty, 2 / n], device=self.device)

    def draw(self) -> Tensor:
        return draw_for_one_card(self.num_envs, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        obs = torch.full((self.num_envs, self._num_cards), self._face_down, device=self.device)
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        state = {
            "cards": obs.to(torch.uint8),
            "face_up": torch.zeros_like(obs, dtype=torch.bool),
            "first": torch.full_like(steps, NO_CARD),
            "deck": self._full.repeat(self.num_envs, 1),
            "steps": steps,
        }
        return state, obs

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        face_up, first, deck = state["face_up"], state["first"], state["deck"]
        is_second = first != NO_CARD
        turned = torch.stack((actions, torch.where(is_second, first, actions)), 1)  # [B, 2]

        known, first_kind = state["cards"].gather(1, turned).unbind(1)
        is_new = known == self._face_down
        dealt, rest = deal(deck, draws)
        kind = torch.where(is_new, dealt, known).to(torch.uint8)
        cards = state["cards"].scatter(1, actions.unsqueeze(1), kind.unsqueeze(1))

        was_up = face_up.gather(1, actions.unsqueeze(1)).squeeze(1)
        is_pair = is_second & (kind == first_kind) & (actions != first) & ~was_up
        outcome = torch.where(is_second, is_pair + 2, was_up.long())
        visible = face_up.scatter(1, turned, True)
        next_up = torch.where(is_pair.unsqueeze(1), visible, face_up)

        steps = state["steps"] + 1
        terminated = next_up.all(1)
        truncated = steps >= self._time_limit
        done = terminated | truncated
        ended = done.unsqueeze(1)
        final_obs = cards.masked_fill(~visible, self._face_down).long()
        # The last card stays in the deck, so that a deck is never empty when it is dealt from.
        taken = (is_new & (deck[:, -1] > 1)).unsqueeze(1)
        return Transition(
            state={
                "cards": cards.masked_fill(ended, self._face_down),
                "face_up": next_up & ~ended,
                "first": actions.masked_fill(is_second | was_up | done, NO_CARD),
                "deck": torch.where(ended, self._full, torch.where(taken, rest, deck)),
                "steps": steps.masked_fill(done, 0),
            },
            obs=final_obs.masked_fill(ended, self._face_down),
            rewards=self._rewards.index_select(0, outcome),
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=final_obs,
        )
