"""RepeatPrevious: name the suit of the card seen k - 1 cards before the last one.

The rules are those of POPGym's environment of the same name. A shuffled deck is dealt card by card. Nothing is scored
until k cards are dealt; then each answer gives +1 / (cards - k) or -1 / (cards - k), so a perfect episode returns 1 and
guessing returns -0.5 on average. An episode has cards - 1 steps and ends `terminated`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import ClassVar

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import CARDS_PER_DECK, SUITS, deal, draw_for_one_card, full_deck, last_card, require_deck

HAS_TRITON = importlib.util.find_spec("triton") is not None


class RepeatPrevious(TorchVectorEnv):
    """Observation: the suit just dealt. Action: a suit. `k` counts the last card as 1."""

    env_dims: ClassVar[dict[str, int]] = {"recent": 1}

    can_truncate = False
    one_launch = True
    """Whether a step on a GPU is one kernel, if Triton is there, and not some 17: the same numbers."""

    def __init__(self, num_envs: int, num_decks: int = 1, k: int = 4, device: torch.device | str = "cpu") -> None:
        num_cards = num_decks * CARDS_PER_DECK
        if num_decks < 1 or not 1 <= k < num_cards:
            raise ValueError(
                f"num_decks is {num_decks} and k is {k}; expected at least one deck "
                f"and 1 <= k < {CARDS_PER_DECK} times the number of decks"
            )
        super().__init__(num_envs, Discrete(SUITS), Discrete(SUITS), {"num_decks": num_decks, "k": k}, device)
        self._full = full_deck(num_decks, self.device)
        self._k = k
        self._unseen_when_scored = num_cards - k
        self._reward = torch.tensor(1 / (num_cards - k), dtype=torch.float32, device=self.device)
        self._penalty = -self._reward
        self._unscored = torch.zeros_like(self._reward)

    def draw(self) -> Tensor:
        return draw_for_one_card(self.num_envs, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        suit, deck = deal(self._full.repeat(self.num_envs, 1), draws)
        recent = torch.zeros(self._k, self.num_envs, dtype=torch.int64, device=self.device)
        return {"deck": deck, "recent": torch.cat((recent[1:], suit.unsqueeze(0)))}, suit

    def require_possible(self, saved: Mapping[str, Tensor]) -> None:
        require_deck(saved["deck"], self._full.cpu())

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        deck, recent = state["deck"], state["recent"]  # [B, 4], [k, B] oldest first
        if deck.is_cuda and self.one_launch and HAS_TRITON:
            return self._in_one_launch(deck, recent, actions, draws)
        unseen = deck[:, -1]
        answer = torch.where(actions == recent[0], self._reward, self._penalty)
        rewards = torch.where(unseen <= self._unseen_when_scored, answer, self._unscored)

        # The last card of a deck is not random, so the draw of that step is used for the first card of the next deck.
        terminated = unseen == 1
        suit, next_deck = deal(torch.where(terminated.unsqueeze(1), self._full, deck), draws)
        return Transition(
            # `recent` still holds cards of the previous episode. Nothing is scored until they have left it.
            state={"deck": next_deck, "recent": torch.cat((recent[1:], suit.unsqueeze(0)))},
            obs=suit,
            rewards=rewards,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            done=terminated,
            final_obs=torch.where(terminated, last_card(deck), suit),
        )

    def _in_one_launch(self, deck: Tensor, recent: Tensor, actions: Tensor, draws: Tensor) -> Transition:
        from holdfast.kernels.triton import repeat_previous  # imports Triton

        after = repeat_previous.step(deck, recent, actions, draws, self._full, self._reward, self._unseen_when_scored)
        return Transition(
            state={"deck": after.deck, "recent": after.recent},
            obs=after.suits,
            rewards=after.rewards,
            terminated=after.terminated,
            truncated=after.truncated,
            done=after.terminated,
            final_obs=after.final_obs,
        )
