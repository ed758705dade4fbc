"""Battleship: sink all ships, told only whether the last shot hit.

The rules are those of POPGym's environment of the same name. A shot at a ship's cell that was not shot at before is a hit and
gives 1 / (cells of ships), any other shot -1 / (cells of water). The episode is `terminated` when all ships are sunk and
`truncated` after as many shots as the board has cells. Both can be true at once.

Ships are placed one after another, each uniformly among the places that are free. The ships of the next episode are placed
during this one, one per step: an episode is never shorter than it has ships.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor
from torch.nn.functional import pad

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import draw_for_cards


class Battleship(TorchVectorEnv):
    """Observation: whether the last shot hit, 0 at the start. Action: row and column of the shot."""

    def __init__(
        self,
        num_envs: int,
        board_size: int = 10,
        ship_sizes: Sequence[int] = (2, 3, 3, 4),
        device: torch.device | str = "cpu",
    ) -> None:
        _require_room(board_size, ship_sizes)
        shots = MultiDiscrete([board_size, board_size])
        settings = {"board_size": board_size, "ship_sizes": list(ship_sizes)}
        super().__init__(num_envs, Discrete(2), shots, settings, device)
        self._size, self._cells = board_size, board_size**2
        self._num_ships, self._ship_cells = len(ship_sizes), sum(ship_sizes)
        # After the last ship there is nothing to place: a ship without cells.
        sizes = [*ship_sizes, 0]
        reach = torch.arange(max(sizes))
        self._beyond = (reach >= torch.tensor(sizes).unsqueeze(1)).to(self.device)  # [ships + 1, longest]
        self._places = torch.stack([_places(board_size, size) for size in sizes]).flatten(0, 1).to(self.device)
        rewards = [-1.0 / (self._cells - self._ship_cells), 1.0 / self._ship_cells]
        self._rewards = torch.tensor(rewards, dtype=torch.float32, device=self.device)
        self._row = torch.tensor([board_size, 1], device=self.device)

    def draw(self) -> Tensor:
        """[B, ships]: for all ships of an episode; a step uses the first column only."""
        return draw_for_cards(self.num_envs, self._num_ships, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        water = torch.zeros(self.num_envs, self._cells, dtype=torch.bool, device=self.device)
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        ships = water
        for number in range(self._num_ships):
            ships = self._place(ships, torch.full_like(steps, number), draws[:, number])
        state = {"ships": ships, "shots": water, "next_ships": water.clone(), "hits": steps, "steps": steps.clone()}
        return state, torch.zeros_like(steps)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        ships, shots = state["ships"], state["shots"]  # [B, cells]
        next_ships = self._place(state["next_ships"], state["steps"].clamp_max(self._num_ships), draws[:, 0])
        cell = (actions * self._row).sum(1, keepdim=True)
        hit = (ships.gather(1, cell) > shots.gather(1, cell)).squeeze(1)

        hits = state["hits"] + hit
        steps = state["steps"] + 1
        terminated = hits == self._ship_cells
        truncated = steps >= self._cells
        done = terminated | truncated
        ended = done.unsqueeze(1)
        return Transition(
            state={
                "ships": torch.where(ended, next_ships, ships),
                "shots": shots.scatter(1, cell, True) & ~ended,
                "next_ships": next_ships & ~ended,
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

    def _place(self, ships: Tensor, number: Tensor, draws: Tensor) -> Tensor:
        """The boards [B, cells] with ship `number` [B] added, at a free place chosen by `draws` [B]."""
        n = self._size
        free = (~ships).view(-1, n, n)
        lines = torch.stack((free, free.transpose(1, 2)), 1)  # [B, 2, n, n] along rows, along columns
        longest = self._beyond.shape[1]
        windows = pad(lines, (0, longest - 1)).unfold(3, longest, 1)  # [B, 2, n, n, longest]
        beyond = self._beyond.index_select(0, number).view(-1, 1, 1, 1, longest)
        fits = (windows | beyond).all(4).flatten(1)  # [B, 2 n n]: a ship may start here and go on along the line
        count = fits.cumsum(1, dtype=torch.int32)
        chosen = (draws.unsqueeze(1) % count[:, -1:]).to(torch.int32)
        place = torch.searchsorted(count, chosen, right=True).squeeze(1)  # the first place that counts more
        return ships | self._places.index_select(0, number * (2 * self._cells) + place)


def _places(board_size: int, ship_size: int) -> Tensor:
    """[2 n n, cells] bool: the cells of a ship that starts in each cell and goes along its row, then along its column."""
    cells = torch.zeros(2, board_size, board_size, board_size, board_size, dtype=torch.bool)
    for line in range(board_size):
        for start in range(board_size):
            cells[0, line, start, line, start : start + ship_size] = True
            cells[1, line, start, start : start + ship_size, line] = True
    return cells.view(2 * board_size**2, board_size**2)


def _require_room(board_size: int, ship_sizes: Sequence[int]) -> None:
    """A board of n rows has n * (n // size) places for a ship that do not touch; some of them must be left for each."""
    taken = 0
    for size in ship_sizes:
        if size < 1 or taken >= board_size * (board_size // size):
            raise ValueError(
                f"ships of {list(ship_sizes)} cells may not fit on a board of {board_size} x {board_size}; "
                "expected positive sizes and a larger board"
            )
        taken += size
    if not ship_sizes:
        raise ValueError("there are no ships; expected at least one size in ship_sizes")
