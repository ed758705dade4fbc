"""Battleship: sink all ships, told only whether the last shot hit.

The rules are those of POPGym's environment of the same name. A shot at a ship's cell that was not shot at before is a hit and
gives 1 / (cells of ships), any other shot -1 / (cells of water). The episode is `terminated` when all ships are sunk and
`truncated` after as many shots as the board has cells. Both can be true at once.

Ships are placed one after another, each uniformly among the places that are free. The ships of the next episode are placed
during this one, one per step: an episode is never shorter than it has ships.

A board is stored by its lines, rows first and then columns. A line is an integer whose bits are its cells, so that a table
says where in it a ship fits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import draw_for_cards

LARGEST_BOARD = 12  # the tables have 2^12 lines


class Battleship(TorchVectorEnv):
    """Observation: whether the last shot hit, 0 at the start. Action: row and column of the shot."""

    inputs = ("obs", "prev_action")
    begins_afresh = False

    render_modes = ("ansi",)

    def __init__(
        self,
        num_envs: int,
        board_size: int = 10,
        ship_sizes: Sequence[int] = (2, 3, 3, 4),
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
    ) -> None:
        _require_room(board_size, ship_sizes)
        shots = MultiDiscrete([board_size, board_size])
        settings = {"board_size": board_size, "ship_sizes": list(ship_sizes)}
        super().__init__(num_envs, Discrete(2), shots, settings, device, render_mode)
        self._size, self._cells = board_size, board_size**2
        self._num_ships, self._ship_cells = len(ship_sizes), sum(ship_sizes)
        sizes = [*ship_sizes, 0]  # after the last ship there is nothing to place: a ship without cells
        counts, starts = zip(*(_fits(board_size, size) for size in sizes))
        self._counts = torch.cat(counts).to(self.device)
        self._starts = torch.cat(starts).flatten().to(self.device)
        self._places = torch.cat([_places(board_size, size) for size in sizes]).to(self.device)
        rewards = [-1.0 / (self._cells - self._ship_cells), 1.0 / self._ship_cells]
        self._rewards = torch.tensor(rewards, dtype=torch.float32, device=self.device)
        self._bits = (torch.ones(board_size, dtype=torch.int64) << torch.arange(board_size)).to(self.device)

    def draw(self) -> Tensor:
        """[B, ships]: for all ships of an episode; a step uses the first column only."""
        return draw_for_cards(self.num_envs, self._num_ships, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        water = torch.zeros(self.num_envs, 2 * self._size, dtype=torch.int64, device=self.device)
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        ships = water
        for number in range(self._num_ships):
            ships = self._place(ships, torch.full_like(steps, number), draws[:, number])
        shots = water[:, : self._size].clone()
        state = {"ships": ships, "shots": shots, "next_ships": water, "hits": steps, "steps": steps.clone()}
        return state, torch.zeros_like(steps)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        ships, shots = state["ships"], state["shots"]  # [B, lines], [B, rows]
        next_ships = self._place(state["next_ships"], state["steps"].clamp_max(self._num_ships), draws[:, 0])
        row, bit = actions[:, :1], self._bits[actions[:, 1:]]
        shot = shots.gather(1, row)
        hit = ((ships.gather(1, row) & ~shot & bit) != 0).squeeze(1)

        hits = state["hits"] + hit
        steps = state["steps"] + 1
        terminated = hits == self._ship_cells
        truncated = steps >= self._cells
        done = terminated | truncated
        ended = done.unsqueeze(1)
        return Transition(
            state={
                "ships": torch.where(ended, next_ships, ships),
                "shots": shots.scatter(1, row, shot | bit).masked_fill(ended, 0),
                "next_ships": next_ships.masked_fill(ended, 0),
                "hits": hits.masked_fill(done, 0),
                "steps": steps.masked_fill(done, 0),
            },
            obs=(hit > done).long(),
            rewards=self._rewards.index_select(0, hit.long()),
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=hit.long(),
        )

    def text(self, row: int) -> str:
        """Hits ☒, misses ⚬, ships not hit ☐, water ·."""
        assert self.state is not None
        lines = zip(self.state["ships"][row].tolist(), self.state["shots"][row].tolist())
        letters = ("·", "☐", "⚬", "☒")
        return "\n".join(
            " ".join(letters[(ships >> column & 1) + 2 * (shots >> column & 1)] for column in range(self._size))
            for ships, shots in lines
        )

    def _place(self, ships: Tensor, number: Tensor, draws: Tensor) -> Tensor:
        """The boards [B, lines] with ship `number` [B] added, at a free place chosen by `draws` [B]."""
        number = number.unsqueeze(1)
        kind = (number << self._size) + ships  # [B, lines] which ship, in which line
        count = self._counts[kind].cumsum(1)  # [B, lines] places in the lines up to this one
        chosen = draws.unsqueeze(1) % count[:, -1:]
        line = torch.searchsorted(count, chosen, right=True)  # the first line that counts more
        from_end = count.gather(1, line) - chosen - 1
        start = self._starts[kind.gather(1, line) * self._size + from_end]
        place = (number * (2 * self._size) + line) * self._size + start
        return ships | self._places[place.squeeze(1)]


def _fits(board_size: int, ship_size: int) -> tuple[Tensor, Tensor]:
    """For each line of `board_size` cells, taken ones as bits: in how many places [lines] a ship of `ship_size` cells fits,
    and the cells [lines, board_size] where it may start, first those where it may.
    """
    lines, starts = torch.arange(1 << board_size).unsqueeze(1), torch.arange(board_size)
    fits = ((lines >> starts) & ((1 << ship_size) - 1) == 0) & (starts + ship_size <= board_size)
    return fits.sum(1), fits.int().argsort(dim=1, descending=True, stable=True)


def _places(board_size: int, ship_size: int) -> Tensor:
    """[lines x starts, lines]: the board with only a ship that lies along a line and starts in one of its cells."""
    n = board_size
    cells = torch.zeros(2, n, n, n, n, dtype=torch.int64)  # along rows or columns, line, start; row, column
    for line in range(n):
        for start in range(n):
            cells[0, line, start, line, start : start + ship_size] = 1
            cells[1, line, start, start : start + ship_size, line] = 1
    bits = torch.ones(n, dtype=torch.int64) << torch.arange(n)
    rows, columns = (cells * bits).sum(-1), (cells * bits.unsqueeze(1)).sum(-2)
    return torch.cat((rows, columns), -1).flatten(0, 2)


def _require_room(board_size: int, ship_sizes: Sequence[int]) -> None:
    """A board of n rows has n * (n // size) places for a ship that do not overlap; one of them must be left for each."""
    if not 1 <= board_size <= LARGEST_BOARD or not ship_sizes:
        raise ValueError(
            f"board_size is {board_size} and ship_sizes are {list(ship_sizes)}; expected a board of 1 to {LARGEST_BOARD} "
            "cells a side and at least one ship"
        )
    taken = 0
    for size in ship_sizes:
        if size < 1 or taken >= board_size * (board_size // size):
            raise ValueError(
                f"ships of {list(ship_sizes)} cells may not fit on a board of {board_size} x {board_size}; "
                "expected positive sizes and a larger board"
            )
        taken += size
