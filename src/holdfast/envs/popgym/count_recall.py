"""CountRecall: how many cards of a kind have been dealt?

The rules are those of POPGym's environment of the same name. At each step a card is dealt from one deck, and a card from a
second deck says which kind is asked for. A right count gives 1 / (cards - 1), a wrong one -1 / (cards - 1). An episode has
cards - 1 steps and ends `terminated`.
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor
from torch.nn.functional import pad

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import CARDS_PER_DECK, KINDS, NAMES, deal, draw_for_cards, full_deck, last_card


class CountRecall(TorchVectorEnv):
    """Observation: the kind just dealt, and the kind asked for. Action: how many of that kind have been dealt so far.

    `deck_type` says what makes a kind: "colors", "suits" or "ranks".
    """

    can_truncate = False

    render_modes = ("ansi",)

    def __init__(
        self,
        num_envs: int,
        num_decks: int = 1,
        deck_type: str = "colors",
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
    ) -> None:
        if num_decks < 1 or deck_type not in KINDS:
            raise ValueError(
                f"num_decks is {num_decks} and deck_type is {deck_type!r}; expected at least one deck "
                f"and one of {', '.join(KINDS)}"
            )
        kinds, num_cards = KINDS[deck_type], num_decks * CARDS_PER_DECK
        self._per_kind = num_cards // kinds
        settings = {"num_decks": num_decks, "deck_type": deck_type}
        seen, counts = MultiDiscrete([kinds] * 2), Discrete(self._per_kind + 1)
        super().__init__(num_envs, seen, counts, settings, device, render_mode)
        self._full = full_deck(num_decks, self.device, kinds)
        self._reward = torch.tensor(1 / (num_cards - 1), dtype=torch.float32, device=self.device)
        self._penalty = -self._reward
        self._ends = torch.arange(2, device=self.device)

    def draw(self) -> Tensor:
        return draw_for_cards(self.num_envs, 2, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        dealt, decks = deal(self._full.repeat(self.num_envs, 2, 1), draws.unsqueeze(2))
        return {"decks": decks, "cards": dealt.clone()}, dealt

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        decks, asked = state["decks"], state["cards"][:, 1:]  # [B, 2, kinds]: dealt from, asked from; [B, 1]
        # Entry j of a deck counts kinds 0 to j. The two entries around a kind give the number of its cards.
        around = pad(decks[:, 0], (1, 0)).gather(1, asked + self._ends)
        seen = self._per_kind + around[:, 0] - around[:, 1]

        # The last cards of the decks are not random, so the draws of that step are used for the next decks.
        terminated = decks[:, 0, -1] == 1
        ended = terminated.unsqueeze(1)
        dealt, next_decks = deal(torch.where(ended.unsqueeze(2), self._full, decks), draws.unsqueeze(2))
        return Transition(
            state={"decks": next_decks, "cards": dealt.clone()},
            obs=dealt,
            rewards=torch.where(actions == seen, self._reward, self._penalty),
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            done=terminated,
            final_obs=torch.where(ended, last_card(decks), dealt),
        )

    def text(self, row: int) -> str:
        assert self.state is not None
        dealt, asked = (NAMES[self.settings["deck_type"]][kind] for kind in self.state["cards"][row].tolist())
        return f"dealt {dealt}, how many {asked}?"
