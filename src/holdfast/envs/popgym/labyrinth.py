"""LabyrinthEscape and LabyrinthExplore: find the exit of a maze, or see all of it.

The rules are those of POPGym's environments of the same names. The player starts at an entrance in the outer wall and sees the cells
around its own: free 0, wall 1, entrance 2, exit 3. At any edge the view has two rows or columns of the maze, and walls after
them: at the upper and the left edge the player is not in the middle. The last number of an observation is the last action, 4
at the start. A step into a wall or out of the maze does nothing. Every step costs 1 / `episode_length`. The episode is
`truncated` after `episode_length` - 1 steps.

- Escape: the exit is in the opposite outer wall. Reaching it gives 1 and ends the episode, `terminated`.
- Explore: a free cell that was not visited before gives 1 / (free cells) in place of the cost; there is no exit. The episode
  is `terminated` when all are visited.

Mazes come from a pool (`pool`). Entrance and exit are drawn in every episode. For each cell of each maze, the walls in view are
stored as the bits of a number: a step looks up one number instead of nine cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.cards import draw_for_cards

FREE, WALL, ENTRANCE, EXIT = range(4)
CELL_KINDS = 5  # POPGym has a fifth kind, hidden, which no observation shows
MOVES = ((0, -1), (0, 1), (-1, 0), (1, 0))  # left, right, up, down
NO_ACTION = len(MOVES)
IS_WALL = 1 << 9  # set in the number of a cell that is a wall itself, after the nine bits of its view


class _Labyrinth(TorchVectorEnv):
    """Maze, moves and view. Observation: the nine cells around the player, and the last action. Action: where to go."""

    render_modes = ("ansi",)
    has_exit: bool

    def __init__(
        self,
        num_envs: int,
        maze_size: int = 10,
        episode_length: int = 1024,
        num_mazes: int = 16_384,
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
    ) -> None:
        if maze_size < 6 or maze_size % 2 or episode_length < 2 or num_mazes < 1:
            raise ValueError(
                f"maze_size is {maze_size}, episode_length {episode_length} and num_mazes {num_mazes}; expected an even size "
                "of at least 6, at least 2 steps, and at least one maze"
            )
        settings = {"maze_size": maze_size, "episode_length": episode_length, "num_mazes": num_mazes}
        obs_space = MultiDiscrete([CELL_KINDS] * 9 + [NO_ACTION + 1])
        super().__init__(num_envs, obs_space, Discrete(len(MOVES)), settings, device, render_mode)
        rooms = maze_size // 2
        self._size, self._last_step = grid_size(rooms), episode_length - 1
        self._cost = -1.0 / episode_length
        self._rewards = torch.tensor([self._cost, self._cost + 1.0], device=self.device)  # on the way; at the exit
        self._targets = _targets(self._size).flatten().to(self.device)
        self._views = _views(self._size).to(self.device)
        self._view_bits = torch.arange(9, dtype=torch.int16, device=self.device)
        self._starts, self._exits = (cells.to(self.device) for cells in _gates(rooms))
        self._no_action = torch.full((num_envs, 1), NO_ACTION, device=self.device)
        self._set_mazes(pool(rooms, num_mazes))

    def _set_mazes(self, walls: Tensor) -> None:
        """Play in these mazes: [mazes, cells] bool."""
        self._num_mazes, self._cells = walls.shape
        self._walls_in_view = _walls_in_view(walls, _views(self._size)).flatten().to(self.device)

    def draw(self) -> Tensor:
        """[B, 1]: for the maze and the entrance of a new episode."""
        return draw_for_cards(self.num_envs, 1, self.generator)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        place = self._new_place(draws)
        return {**place, "steps": torch.zeros_like(place["maze"])}, self._see(place, self._no_action)

    def text(self, row: int) -> str:
        """Walls █, entrance S, exit E, player @."""
        assert self.state is not None
        place = {name: int(leaf[row]) for name, leaf in self.state.items() if leaf.dim() == 1}
        first = place["maze"] * self._cells
        numbers = self._walls_in_view[first : first + self._cells].tolist()
        letters = ["█" if number & IS_WALL else " " for number in numbers]
        for name, letter in (("start", "S"), ("exit", "E"), ("position", "@")):
            if name in place:
                letters[place[name]] = letter
        return "\n".join("".join(letters[at : at + self._size]) for at in range(0, self._cells, self._size))

    def require_possible(self, saved: Mapping[str, Tensor]) -> None:
        for name in ("maze", "start", "position", *(["exit"] if self.has_exit else [])):
            limit = self._num_mazes if name == "maze" else self._cells
            if (saved[name] < 0).any() or (saved[name] >= limit).any():
                raise ValueError(f"saved {name!r} must be from 0 to {limit - 1}")

    def _new_place(self, draws: Tensor) -> State:
        """A maze of the pool, its entrance, its exit, and the player at the entrance."""
        gates = len(self._starts)
        number = draws.squeeze(1) % (self._num_mazes * gates)
        gate = number % gates
        start = self._starts[gate]
        place = {"maze": number // gates, "start": start, "position": start.clone()}
        return {**place, "exit": self._exits[gate]} if self.has_exit else place

    def _move(self, state: State, actions: Tensor) -> State:
        """Where the player is after its action; entrance and exit are gaps in the outer wall."""
        maze, start, position = state["maze"], state["start"], state["position"]
        target = self._targets[position * len(MOVES) + actions]
        is_wall = (self._walls_in_view[maze * self._cells + target] & IS_WALL) != 0
        stays = is_wall & (target != start)
        if not self.has_exit:
            return {"maze": maze, "start": start, "position": torch.where(stays, position, target)}
        stays = stays & (target != state["exit"])
        return {"maze": maze, "start": start, "position": torch.where(stays, position, target), "exit": state["exit"]}

    def _see(self, place: State, last_action: Tensor) -> Tensor:
        """[B, 10]: the view from a place, and the last action [B, 1]."""
        walls = self._walls_in_view[place["maze"] * self._cells + place["position"]].unsqueeze(1)
        seen = ((walls >> self._view_bits) & 1).long()  # [B, 9]
        cells = self._views.index_select(0, place["position"])
        seen = seen.masked_fill(cells == place["start"].unsqueeze(1), ENTRANCE)
        if self.has_exit:
            seen = seen.masked_fill(cells == place["exit"].unsqueeze(1), EXIT)
        return torch.cat((seen, last_action), 1)

    def _end(
        self, moved: State, new: State, actions: Tensor, steps: Tensor, rewards: Tensor, terminated: Tensor
    ) -> Transition:
        """The step so far, and a new episode at the place `new` where this one ended. State: places and steps only."""
        truncated = steps >= self._last_step
        done = terminated | truncated
        final_obs = self._see(moved, actions.unsqueeze(1))
        state = {name: torch.where(done, new[name], leaf) for name, leaf in moved.items()}
        return Transition(
            state={**state, "steps": steps.masked_fill(done, 0)},
            obs=torch.where(done.unsqueeze(1), self._see(new, self._no_action), final_obs),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=final_obs,
        )


class LabyrinthEscape(_Labyrinth):
    """Find the exit."""

    has_exit = True

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        moved = self._move(state, actions)
        out = moved["position"] == moved["exit"]
        return self._end(moved, self._new_place(draws), actions, state["steps"] + 1, self._rewards[out.long()], out)


class LabyrinthExplore(_Labyrinth):
    """Visit all cells."""

    has_exit = False

    def _set_mazes(self, walls: Tensor) -> None:
        super()._set_mazes(walls)
        free = (~walls).sum(1)  # [mazes]
        self._free, self._gains = free.to(self.device), (1 / free.double()).to(self.device, torch.float32)
        self._first_visits = _first_visits(self._cells).to(self.device)
        self._bits = (torch.ones(64, dtype=torch.int64) << torch.arange(64)).to(self.device)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        state, obs = super().begin(draws)
        return {**state, "visited": self._first_visits[state["start"]], "left": self._free[state["maze"]]}, obs

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        moved, new = self._move(state, actions), self._new_place(draws)
        cell = moved["position"].unsqueeze(1)
        word, bit = cell >> 6, self._bits[cell & 63]  # [B, 1] each
        before = state["visited"].gather(1, word)
        is_new = ((before & bit) == 0).squeeze(1)
        rewards = self._gains[moved["maze"]].masked_fill(~is_new, self._cost)
        left = state["left"] - is_new.long()
        step = self._end(moved, new, actions, state["steps"] + 1, rewards, left == 0)

        visited = state["visited"].scatter(1, word, before | bit)
        visited = torch.where(step.done.unsqueeze(1), self._first_visits[new["start"]], visited)
        left = torch.where(step.done, self._free[new["maze"]], left)
        step.state.update(visited=visited, left=left)
        return step

    def text(self, row: int) -> str:
        """As in Escape, with visited cells as dots."""
        assert self.state is not None
        words = self.state["visited"][row].tolist()
        lines, cell = [], 0
        for line in super().text(row).split("\n"):
            seen = [words[n // 64] >> n % 64 & 1 for n in range(cell, cell + self._size)]
            lines.append("".join("·" if visited and letter == " " else letter for visited, letter in zip(seen, line)))
            cell += self._size
        return "\n".join(lines)


def _targets(size: int) -> Tensor:
    """[cells, 4]: the cell that each move leads to; at the edge, moves out of the maze stay."""
    last = size - 1
    return torch.tensor(
        [
            [min(max(row + r, 0), last) * size + min(max(column + c, 0), last) for r, c in MOVES]
            for row in range(size)
            for column in range(size)
        ]
    )


def _views(size: int) -> Tensor:
    """[cells, 9]: the cells that are seen from each; size^2 stands for a wall that fills up the view."""

    def line(at: int) -> list[int | None]:
        inside = [i for i in (at - 1, at, at + 1) if 0 <= i < size]
        return [*inside, *[None] * (3 - len(inside))]

    return torch.tensor(
        [
            [size**2 if r is None or c is None else r * size + c for r in line(row) for c in line(column)]
            for row in range(size)
            for column in range(size)
        ]
    )


def _gates(rooms: int) -> tuple[Tensor, Tensor]:
    """[4 rooms^2] each: entrance and exit in opposite sides of the outer wall, next to rooms; all are equally likely."""
    size = grid_size(rooms)
    odd, last = range(1, size, 2), size - 1
    down = [(a, last * size + b) for a in odd for b in odd]
    right = [(a * size, b * size + last) for a in odd for b in odd]
    pairs = torch.tensor([*down, *((b, a) for a, b in down), *right, *((b, a) for a, b in right)])
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def _walls_in_view(walls: Tensor, views: Tensor) -> Tensor:
    """[mazes, cells] int16: bit i is set if the i-th of the cells in view is a wall, the bit after them if the cell itself is."""
    beyond = walls.new_ones(len(walls), 1)  # the cell that fills up views
    filled = torch.cat((walls, beyond), 1).to(torch.int16)
    result = filled[:, :-1] * IS_WALL
    for bit, cells in enumerate(views.unbind(1)):
        result += filled[:, cells] << bit
    return result


def _first_visits(cells: int) -> Tensor:
    """[cells, words]: the cells of a maze as bits, 64 a word, with only one set."""
    numbers = torch.arange(cells)
    words = torch.zeros(cells, -(-cells // 64), dtype=torch.int64)
    return words.scatter(1, (numbers >> 6).unsqueeze(1), (torch.ones_like(numbers) << (numbers & 63)).unsqueeze(1))


# --- mazes -----------------------------------------------------------------------------------------------------------
# Random mazes by the hunt-and-kill method, many at once.
#
# A maze of n x n rooms is a grid of (2n + 1) x (2n + 1) cells. Rooms are the cells with odd row and column, all others are walls
# until they are carved. A walk starts in a random room and goes on to a random neighbor that no walk has entered, carving the wall
# between them, until there is none. Then a random room is picked; if it has been entered, a walk goes on from there. There
# are as many picks as the grid has cells. That is POPGym's maze (mazelib's `HuntAndKill`); one in about ten thousand is left with
# rooms that were never entered.
#
# Making a maze takes hundreds of steps, too many for the step that ends an episode. So the environments draw from a pool.


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
