"""Random mazes by the hunt-and-kill method, many at once. The tasks in them are in `labyrinth.py`.

A maze of n x n rooms is a grid of (2n + 1) x (2n + 1) cells. Rooms are the cells with odd row and column, all others are walls
until they are carved. A walk starts in a random room and goes on to a random neighbor that no walk has entered, carving the wall
between them, until there is none. Then a random room is picked; if it has been entered, a walk goes on from there. There
are as many picks as the grid has cells. That is POPGym's maze (mazelib's `HuntAndKill`); one in about ten thousand is left with
rooms that were never entered.

Making a maze takes hundreds of steps, too many for the step that ends an episode. So the environments draw from a pool.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

SEED = 20230301
"""Of every pool: a pool depends on its size alone, so that a checkpoint needs only the number of a maze."""


def grid_size(rooms: int) -> int:
    """Cells on a side of a maze with `rooms` rooms on a side."""
    return 2 * rooms + 1


@lru_cache(maxsize=4)  # a training makes several environments: do not make their mazes again
def pool(rooms: int, count: int) -> Tensor:
    """[count, cells] bool, True in walls: always the same mazes for the same arguments. On the CPU; not to be changed."""
    return hunt_and_kill(rooms, count, torch.Generator().manual_seed(SEED))


def hunt_and_kill(rooms: int, count: int, generator: torch.Generator) -> Tensor:
    """[count, cells] bool, True in walls: random mazes of `rooms` x `rooms` rooms, row by row."""
    size = grid_size(rooms)
    picks, num_rooms = size**2, rooms**2
    room_cells = _room_cells(rooms)
    steps = torch.tensor([-size, size, -1, 1])  # to the wall of a room; its neighbor is twice as far
    walls = torch.ones(count, size**2, dtype=torch.bool)
    # A neighbor beyond the edge is cell 0, which stands as "entered" while the mazes are made.
    walls[:, 0] = False
    neighbors = _neighbors(rooms)  # [cells, 4]

    def random_rooms() -> Tensor:
        return room_cells[torch.randint(num_rooms, (count,), generator=generator)]

    here = random_rooms()
    walls.scatter_(1, here.unsqueeze(1), False)
    picked = torch.zeros(count, dtype=torch.int64)
    for _ in range(num_rooms - 1 + picks):  # in each, a maze grows by one room or has its next pick
        ahead = neighbors[here]  # [count, 4]
        can_go = walls.gather(1, ahead) & ~walls.gather(1, here.unsqueeze(1))
        goes = can_go.any(1)
        chosen = torch.rand(count, 4, generator=generator).masked_fill(~can_go, -1).argmax(1, keepdim=True)
        room = ahead.gather(1, chosen).squeeze(1)
        between = here + steps[chosen.squeeze(1)]
        carved = torch.stack((room, between), 1).masked_fill(~goes.unsqueeze(1), 0)
        walls.scatter_(1, carved, False)
        picks_now = ~goes & (picked < picks)
        here = torch.where(goes, room, torch.where(picks_now, random_rooms(), here))
        picked = picked + picks_now
    walls[:, 0] = True
    return walls


def _room_cells(rooms: int) -> Tensor:
    """[rooms^2]: the cell of each room."""
    odd = 2 * torch.arange(rooms) + 1
    return (odd.unsqueeze(1) * grid_size(rooms) + odd).flatten()


def _neighbors(rooms: int) -> Tensor:
    """[cells, 4]: the rooms above, below, left and right of a room, 0 beyond the edge; zeros for other cells."""
    size = grid_size(rooms)
    result = torch.zeros(size**2, 4, dtype=torch.int64)
    for cell in _room_cells(rooms).tolist():
        row, column = divmod(cell, size)
        places = [(row - 2, column), (row + 2, column), (row, column - 2), (row, column + 2)]
        for index, (r, c) in enumerate(places):
            if 0 < r < size and 0 < c < size:
                result[cell, index] = r * size + c
    return result
