"""The environments that come with Holdfast: ids, descriptions, and registration with gymnasium.

Importing this module imports neither torch nor `gymnasium.vector`. The environments themselves are one file each; to
write one, start at `base.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym


@dataclass(frozen=True)
class EnvRow:
    """One line of `holdfast envs`.

    Returns are means over episodes: with random actions, and the best possible. Where the best is not known, it is a bound:
    the return of a player who sees what is hidden.
    """

    id: str
    description: str
    observation_space: str
    action_space: str
    episode_length: str
    chance_return: float
    solved_return: float
    entry_point: str = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)


LEVELS = ("Easy", "Medium", "Hard")


def _task(
    name: str,
    module: str,
    description: str,
    spaces: tuple[str, str],
    length: int | str,
    returns: tuple[float, float],
    **kwargs: Any,
) -> EnvRow:
    """A row of the task that `module` of this package holds. spaces: observation, action; returns: chance, solved."""
    task = re.sub(rf"({'|'.join(LEVELS)})$", "", name)
    entry_point = f"holdfast.envs.{module}:{task}"
    return EnvRow(f"holdfast/{name}-v0", description, *spaces, str(length), *returns, entry_point, kwargs)


def _each_level(row: Callable[..., EnvRow], *settings: tuple[Any, ...]) -> list[EnvRow]:
    """The rows of a task for the settings of each level."""
    return [row(level, *of_level) for level, of_level in zip(LEVELS, settings, strict=True)]


def _repeat_previous(level: str, num_decks: int, k: int) -> EnvRow:
    text, spaces = f"name the suit dealt {k - 1} cards before the last one", ("Discrete(4)", "Discrete(4)")
    name, length = f"RepeatPrevious{level}", 52 * num_decks - 1
    return _task(name, "repeat_previous", text, spaces, length, (-0.5, 1.0), num_decks=num_decks, k=k)


def _repeat_first(level: str, num_decks: int) -> EnvRow:
    text, spaces = "name the suit of the first card of the episode, at every step", ("Discrete(4)", "Discrete(4)")
    name, length = f"RepeatFirst{level}", 52 * num_decks - 1
    return _task(name, "repeat_first", text, spaces, length, (-0.5, 1.0), num_decks=num_decks)


def _cartpole(name: str, text: str, module: str, length: int, chance: float, **kwargs: Any) -> EnvRow:
    return _task(name, module, text, ("Box(2)", "Discrete(2)"), f"up to {length}", (chance, 1.0), **kwargs)


def _position_only_cartpole(level: str, length: int) -> EnvRow:
    name, text, chance = f"PositionOnlyCartPole{level}", "balance a pole without seeing velocities", 22.3 / length
    # Random pushes drop the pole after 22.3 steps.
    return _cartpole(name, text, "position_only_cartpole", length, round(chance, 3), max_episode_length=length)


def _noisy_cartpole(level: str, noise_sigma: float) -> EnvRow:
    name, text = f"NoisyPositionOnlyCartPole{level}", f"balance a pole, seeing positions with noise of {noise_sigma}"
    return _cartpole(name, text, "popgym.cartpole", 200, 0.111, noise_sigma=noise_sigma)


def _velocity_only_cartpole(level: str, length: int) -> EnvRow:
    name, text, chance = f"VelocityOnlyCartPole{level}", "balance a pole, seeing velocities only", 22.3 / length
    return _cartpole(name, text, "popgym.cartpole", length, round(chance, 3), max_episode_length=length)


def _pendulum(level: str, length: int, chance: float, solved: float) -> EnvRow:
    name, text = f"PositionOnlyPendulum{level}", "swing a pendulum up without seeing its speed"
    spaces = ("Box(2)", "Box(1)")
    return _task(name, "popgym.pendulum", text, spaces, length, (chance, solved), max_episode_length=length)


def _noisy_pendulum(level: str, sigma: float) -> EnvRow:
    name, text = f"NoisyPositionOnlyPendulum{level}", f"swing a pendulum up, seeing its angle with noise of {sigma}"
    return _task(name, "popgym.pendulum", text, ("Box(2)", "Box(1)"), 200, (0.244, 0.915), noise_sigma=sigma)


def _multiarmed_bandit(level: str, arms: int, length: int, solved: float) -> EnvRow:
    name, text = f"MultiarmedBandit{level}", f"find the best of {arms} arms and pull it"
    spaces, kwargs = ("Discrete(2)", f"Discrete({arms})"), {"num_bandits": arms, "episode_length": length}
    return _task(name, "popgym.multiarmed_bandit", text, spaces, length, (0.0, solved), **kwargs)


def _higher_lower(level: str, num_decks: int, solved: float) -> EnvRow:
    name, text, spaces = f"HigherLower{level}", "is the next card higher or lower?", ("Discrete(13)", "Discrete(2)")
    return _task(name, "popgym.higher_lower", text, spaces, 52 * num_decks - 1, (0.0, solved), num_decks=num_decks)


def _autoencode(level: str, num_decks: int) -> EnvRow:
    name, text = f"Autoencode{level}", f"watch {52 * num_decks} cards, then name their suits in reverse order"
    spaces = ("Tuple(Discrete(2), Discrete(4))", "Discrete(4)")
    return _task(name, "popgym.autoencode", text, spaces, 104 * num_decks - 1, (-0.5, 1.0), num_decks=num_decks)


def _count_recall(level: str, num_decks: int, deck_type: str, kinds: int) -> EnvRow:
    name, text = f"CountRecall{level}", f"how many cards of a kind have been dealt ({deck_type})?"
    counts = 52 * num_decks // kinds + 1
    spaces, kwargs = (f"MultiDiscrete({kinds}, {kinds})", f"Discrete({counts})"), {"deck_type": deck_type}
    returns = (round(2 / counts - 1, 3), 1.0)
    return _task(name, "popgym.count_recall", text, spaces, 52 * num_decks - 1, returns, num_decks=num_decks, **kwargs)


def _concentration(level: str, num_decks: int, deck_type: str, kinds: int, chance: float) -> EnvRow:
    name, text, cards = f"Concentration{level}", f"turn up pairs of cards ({deck_type})", 52 * num_decks
    spaces, kwargs = (f"MultiDiscrete({cards} x {kinds + 1})", f"Discrete({cards})"), {"deck_type": deck_type}
    returns, length = (chance, 1.0), f"{cards} to {2 * cards}"
    return _task(name, "popgym.concentration", text, spaces, length, returns, num_decks=num_decks, **kwargs)


def _battleship(level: str, board_size: int, chance: float) -> EnvRow:
    name, text = f"Battleship{level}", f"sink four ships on a hidden board of {board_size} x {board_size}"
    spaces = ("Discrete(2)", f"MultiDiscrete({board_size}, {board_size})")
    return _task(
        name, "popgym.battleship", text, spaces, f"12 to {board_size**2}", (chance, 1.0), board_size=board_size
    )


def _minesweeper(level: str, board_size: int, num_mines: int, chance: float) -> EnvRow:
    name, text = f"MineSweeper{level}", f"avoid {num_mines} mines on a hidden board of {board_size} x {board_size}"
    spaces = (f"Discrete({num_mines + 1 if num_mines < 10 else 10})", f"MultiDiscrete({board_size}, {board_size})")
    length, kwargs = f"up to {board_size**2 - num_mines}", {"board_size": board_size, "num_mines": num_mines}
    return _task(name, "popgym.minesweeper", text, spaces, length, (chance, 1.0), **kwargs)


def _labyrinth(kind: str, level: str, size: int, chance: float, solved: float) -> EnvRow:
    text = "find the exit of a maze" if kind == "Escape" else "visit all cells of a maze"
    spaces, length = ("MultiDiscrete(10 x 5)", "Discrete(4)"), "up to 1023"
    return _task(f"Labyrinth{kind}{level}", "popgym.labyrinth", text, spaces, length, (chance, solved), maze_size=size)


CATALOG: tuple[EnvRow, ...] = (
    *_each_level(_repeat_previous, (1, 4), (2, 32), (3, 64)),
    *_each_level(_repeat_first, (1,), (8,), (16,)),
    *_each_level(_position_only_cartpole, (200,), (400,), (600,)),
    *_each_level(_noisy_cartpole, (0.1,), (0.2,), (0.3,)),
    *_each_level(_velocity_only_cartpole, (200,), (400,), (600,)),
    *_each_level(_pendulum, (200, 0.244, 0.915), (150, 0.242, 0.887), (100, 0.241, 0.83)),
    *_each_level(_noisy_pendulum, (0.1,), (0.2,), (0.3,)),
    *_each_level(_multiarmed_bandit, (10, 200, 0.818), (20, 400, 0.905), (30, 600, 0.935)),
    *_each_level(_higher_lower, (1, 0.527), (2, 0.516), (3, 0.512)),
    *_each_level(_autoencode, (1,), (2,), (3,)),
    *_each_level(_count_recall, (1, "colors", 2), (2, "suits", 4), (4, "ranks", 13)),
    *_each_level(_concentration, (1, "colors", 2, -0.191), (2, "colors", 2, -0.186), (1, "ranks", 13, -0.834)),
    *_each_level(_battleship, (8, -0.45), (10, -0.416), (12, -0.399)),
    *_each_level(_minesweeper, (4, 2, -0.234), (6, 6, -0.402), (8, 10, -0.433)),
    *_each_level(partial(_labyrinth, "Escape"), (10, -0.418, 0.979), (14, -0.832, 0.965), (18, -0.955, 0.949)),
    *_each_level(partial(_labyrinth, "Explore"), (10, -0.357, 0.983), (14, -0.613, 0.957), (18, -0.743, 0.919)),
    _task(
        "TMaze",
        "t_maze",
        "turn at the end of a corridor (`length` cells, 20) as a sign at its start showed",
        ("Box(4)", "Discrete(3)"),
        "up to 3 x length",
        (0.0, 1.0),
    ),
)


def list_envs() -> list[EnvRow]:
    """The environments that come with Holdfast.

    >>> [row.id for row in list_envs()][-1]
    'holdfast/TMaze-v0'
    """
    return list(CATALOG)


def register_all() -> None:
    """Register the ids with gymnasium. Importing `holdfast.envs` does this; calling it again is a no-op."""
    for row in CATALOG:
        if row.id not in gym.registry:
            task = row.entry_point.removeprefix("holdfast.envs.").replace(":", ".")
            gym.register(
                row.id,
                entry_point=f"holdfast.envs.single:{task}",
                vector_entry_point=row.entry_point,
                kwargs=dict(row.kwargs),
            )
