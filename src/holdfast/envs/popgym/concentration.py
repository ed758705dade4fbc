"""Concentration: turn up two cards at a time and find the pairs.

The rules are those of POPGym's environment of the same name. All cards of a deck lie face down. Every second step ends a
try: two cards of a kind stay face up and give 2 / cards, others are turned down again and give -2 / episode_length. Choosing
a card that is face up already ends the try at once and gives -1 / episode_length per card chosen in it. The episode is
`terminated` when all cards are face up and `truncated` at its time limit. Both can be true at once.

What a card shows is drawn when it is first turned, from the cards not seen yet. That is the same game as shuffling first and
needs one random number per step. Cards are stored as kind XOR face-down, so 0 is a card not seen yet, and hiding a card is a
multiplication by 0: several times faster than a selection, for boards of bytes.
"""

from __future__ import annotations

import math

import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import CARDS_PER_DECK, KINDS, NAMES, RANKS, deal, draw_for_one_card, full_deck

NO_CARD = -1


class Concentration(TorchVectorEnv):
    """Observation: the kind of each card, the number of kinds if it is face down. Action: the card to turn.

    `deck_type` says what makes a pair: "colors" or "ranks".
    """

    inputs = ("obs", "prev_action")

    render_modes = ("ansi",)

    def __init__(
        self,
        num_envs: int,
        num_decks: int = 1,
        deck_type: str = "ranks",
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
    ) -> None:
        if num_decks < 1 or deck_type not in ("colors", "ranks"):
            raise ValueError(
                f"num_decks is {num_decks} and deck_type is {deck_type!r}; expected at least one deck "
                "and colors or ranks"
            )
        self._num_cards, self._face_down = num_decks * CARDS_PER_DECK, KINDS[deck_type]
        seen = MultiDiscrete([self._face_down + 1] * self._num_cards)
        settings = {"num_decks": num_decks, "deck_type": deck_type}
        super().__init__(num_envs, seen, Discrete(self._num_cards), settings, device, render_mode)
        n = self._num_cards
        self._time_limit = math.ceil(2 * n - n / (2 * n - 1))
        self._full = full_deck(num_decks, self.device, self._face_down)
        penalty = -1 / self._time_limit
        # Of a first card, of one that was face up, of a second card that does not fit, of a pair.
        self._rewards = torch.tensor([0.0, penalty, 2 * penalty, 2 / n], device=self.device)

    def draw(self) -> Tensor:
        return draw_for_one_card(self.num_envs, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        cards = torch.zeros(self.num_envs, self._num_cards, dtype=torch.uint8, device=self.device)
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        state = {
            "cards": cards,
            "face_up": cards.clone(),
            "first": torch.full_like(steps, NO_CARD),
            "deck": self._full.repeat(self.num_envs, 1),
            "pairs": steps.clone(),
            "steps": steps,
        }
        return state, (cards ^ self._face_down).long()

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        face_up, first, deck = state["face_up"], state["first"], state["deck"]
        is_second = first != NO_CARD
        turned = torch.stack((actions, torch.where(is_second, first, actions)), 1)  # [B, 2]

        known, first_card = state["cards"].gather(1, turned).unbind(1)
        is_new = known == 0
        dealt, rest = deal(deck, draws)
        card = torch.where(is_new, dealt ^ self._face_down, known).to(torch.uint8)
        cards = state["cards"].scatter(1, actions.unsqueeze(1), card.unsqueeze(1))

        was_up = face_up.gather(1, actions.unsqueeze(1)).squeeze(1) != 0
        is_pair = is_second & (card == first_card) & (actions != first) & ~was_up
        outcome = torch.where(is_second, is_pair + 2, was_up.long())
        visible = face_up.scatter(1, turned, 1)

        steps, pairs = state["steps"] + 1, state["pairs"] + is_pair
        terminated = pairs == self._num_cards // 2
        truncated = steps >= self._time_limit
        done = terminated | truncated
        ended = done.unsqueeze(1)
        goes_on = ~ended
        seen = cards * visible
        # The last card stays in the deck, so that a deck is never empty when it is dealt from.
        taken = (is_new & (deck[:, -1] > 1)).unsqueeze(1)
        return Transition(
            state={
                "cards": cards * goes_on,
                "face_up": (face_up | visible * is_pair.unsqueeze(1)) * goes_on,
                "first": actions.masked_fill(is_second | was_up | done, NO_CARD),
                "deck": torch.where(ended, self._full, torch.where(taken, rest, deck)),
                "pairs": pairs.masked_fill(done, 0),
                "steps": steps.masked_fill(done, 0),
            },
            obs=((seen * goes_on) ^ self._face_down).long(),
            rewards=self._rewards.index_select(0, outcome),
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=(seen ^ self._face_down).long(),
        )

    def text(self, row: int) -> str:
        """The cards that are face up, and question marks. A card turned in the current try is face up."""
        assert self.state is not None
        cards, face_up = self.state["cards"][row].tolist(), self.state["face_up"][row].tolist()
        first = int(self.state["first"][row])
        names = NAMES[self.settings["deck_type"]]
        letters = [
            names[card ^ self._face_down] if up or index == first else "?"
            for index, (card, up) in enumerate(zip(cards, face_up))
        ]
        lines = [letters[start : start + RANKS] for start in range(0, self._num_cards, RANKS)]
        return "\n".join(" ".join(name.ljust(2) for name in line).rstrip() for line in lines)
