"""MineSweeper: look at all squares without a mine, seeing only how many mines are around the last one.

The rules are those of POPGym's environment of the same name. With n = squares without a mine: a new square gives 1 / n, one
that was looked at before -0.5 / (n - 2), a mine -0.5 - 1 / n. A mine, or the last square, ends the episode `terminated`;
after n steps it is `truncated`.

A board has up to 64 squares and is stored as the bits of an integer.
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import draw_for_cards

MOST_SQUARES = 64


class MineSweeper(TorchVectorEnv):
    """Observation: mines on the square just looked at and its neighbors, 0 at the start. Action: row and column."""

    inputs = ("obs", "prev_action")

    render_modes = ("ansi",)

    def __init__(
        self,
        num_envs: int,
        board_size: int = 4,
        num_mines: int = 2,
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
    ) -> None:
        squares = board_size**2
        if board_size < 2 or squares > MOST_SQUARES or not 1 <= num_mines <= squares - 3:
            raise ValueError(
                f"board_size is {board_size} and num_mines is {num_mines}; expected boards of 2 to 8 squares a side, "
                "at least one mine, and at least 3 squares without"
            )
        settings = {"board_size": board_size, "num_mines": num_mines}
        shape = MultiDiscrete([board_size, board_size])
        super().__init__(num_envs, Discrete(min(num_mines + 1, 10)), shape, settings, device, render_mode)
        self._clear = squares - num_mines
        numbers = torch.arange(squares, device=self.device)
        self._bits = torch.ones_like(numbers) << numbers
        self._all = self._bits.sum()
        last = numbers[squares - num_mines :]  # for each mine the last square that it may go to
        self._choices, self._last_bits = last + 1, self._bits[last].unbind()
        near, counted = _neighborhoods(board_size)
        self._near, self._counted = near.to(self.device), counted.to(self.device)
        right = 1 / self._clear
        self._rewards = torch.tensor([right, -0.5 / (self._clear - 2), -0.5 - right], device=self.device)
        self._row = torch.tensor([board_size, 1], device=self.device)

    def draw(self) -> Tensor:
        """[B, mines]: for the mines of a new episode."""
        return draw_for_cards(self.num_envs, self.settings["num_mines"], self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        mines = self._lay_mines(draws)
        zero = torch.zeros_like(mines)
        return {"mines": mines, "viewed": zero, "steps": zero.clone()}, zero.clone()

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        mines, viewed = state["mines"], state["viewed"]  # [B] bits
        square = (actions * self._row).sum(1)
        bit = self._bits.index_select(0, square)
        exploded = (mines & bit) != 0
        outcome = ((viewed & bit) != 0) + exploded * 2
        viewed = viewed | bit
        near, counted = self._near.index_select(0, square), self._counted.index_select(0, square)  # [B, 9]
        seen = ((mines.unsqueeze(1) >> near) & counted).sum(1)

        steps = state["steps"] + 1
        terminated = exploded | ((mines | viewed) == self._all)
        truncated = (steps == self._clear) > terminated  # at the limit, and not terminated
        done = terminated | truncated
        return Transition(
            state={
                "mines": torch.where(done, self._lay_mines(draws), mines),
                "viewed": viewed.masked_fill(done, 0),
                "steps": steps.masked_fill(done, 0),
            },
            obs=seen.masked_fill(done, 0),
            rewards=self._rewards.index_select(0, outcome),
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=seen,
        )

    def text(self, row: int) -> str:
        """The mines around each square that was looked at, and dots."""
        assert self.state is not None
        size, mines, viewed = self.settings["board_size"], int(self.state["mines"][row]), int(self.state["viewed"][row])
        near, counted = self._near.tolist(), self._counted.tolist()
        seen = [sum((mines >> n & 1) * c for n, c in zip(*pair)) for pair in zip(near, counted)]
        letters = [str(count) if viewed >> square & 1 else "." for square, count in enumerate(seen)]
        return "\n".join(" ".join(letters[start : start + size]) for start in range(0, size**2, size))

    def _lay_mines(self, draws: Tensor) -> Tensor:
        """[B] bits: every set of `num_mines` squares is equally likely (Floyd's sampling without replacement).

        Mine i goes to one of the squares 0 to j, where j = squares - num_mines + i, or to square j if that one is taken.
        """
        bits = self._bits[draws % self._choices]  # [B, mines]
        mines = torch.zeros_like(bits[:, 0])
        for bit, last in zip(bits.unbind(1), self._last_bits):
            mines = mines | torch.where((mines & bit) != 0, last, bit)
        return mines


def _neighborhoods(board_size: int) -> tuple[Tensor, Tensor]:
    """[squares, 9]: each square and its neighbors, and 1 where there is one (0 beyond the edge)."""
    near = torch.zeros(board_size**2, 9, dtype=torch.int64)
    counted = torch.zeros_like(near)
    for square in range(board_size**2):
        row, column = divmod(square, board_size)
        for index in range(9):
            r, c = row + index // 3 - 1, column + index % 3 - 1
            if 0 <= r < board_size and 0 <= c < board_size:
                near[square, index], counted[square, index] = r * board_size + c, 1
    return near, counted
