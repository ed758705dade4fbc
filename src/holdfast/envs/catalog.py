"""The environments that come with Holdfast: ids, descriptions, and registration with gymnasium.

Importing this module imports neither torch nor `gymnasium.vector`. The environments themselves are one file each; to
write one, start at `base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


def _repeat_previous(level: str, num_decks: int, k: int) -> EnvRow:
    return EnvRow(
        id=f"holdfast/RepeatPrevious{level}-v0",
        description=f"name the suit dealt {k - 1} cards before the last one",
        observation_space="Discrete(4)",
        action_space="Discrete(4)",
        episode_length=str(52 * num_decks - 1),
        chance_return=-0.5,
        solved_return=1.0,
        entry_point="holdfast.envs.repeat_previous:RepeatPrevious",
        kwargs={"num_decks": num_decks, "k": k},
    )


def _repeat_first(level: str, num_decks: int) -> EnvRow:
    return EnvRow(
        id=f"holdfast/RepeatFirst{level}-v0",
        description="name the suit of the first card of the episode, at every step",
        observation_space="Discrete(4)",
        action_space="Discrete(4)",
        episode_length=str(52 * num_decks - 1),
        chance_return=-0.5,
        solved_return=1.0,
        entry_point="holdfast.envs.repeat_first:RepeatFirst",
        kwargs={"num_decks": num_decks},
    )


def _position_only_cartpole(level: str, max_episode_length: int) -> EnvRow:
    return EnvRow(
        id=f"holdfast/PositionOnlyCartPole{level}-v0",
        description="balance a pole without seeing velocities",
        observation_space="Box(2)",
        action_space="Discrete(2)",
        episode_length=f"up to {max_episode_length}",
        chance_return=round(22.3 / max_episode_length, 3),  # random pushes drop the pole after 22.3 steps
        solved_return=1.0,
        entry_point="holdfast.envs.position_only_cartpole:PositionOnlyCartPole",
        kwargs={"max_episode_length": max_episode_length},
    )


def _popgym(
    name: str,
    description: str,
    spaces: tuple[str, str],
    length: int | str,
    returns: tuple[float, float],
    module: str,
    **kwargs: Any,
) -> EnvRow:
    """One of POPGym's tasks, in `holdfast.envs.popgym`. spaces: observation, action; returns: chance, solved."""
    class_name = name.removesuffix("Easy").removesuffix("Medium").removesuffix("Hard")
    entry_point = f"holdfast.envs.popgym.{module}:{class_name}"
    return EnvRow(f"holdfast/{name}-v0", description, *spaces, str(length), *returns, entry_point, kwargs)


def _noisy_cartpole(level: str, noise_sigma: float) -> EnvRow:
    name, text = f"NoisyPositionOnlyCartPole{level}", f"balance a pole, seeing positions with noise of {noise_sigma}"
    spaces = ("Box(2)", "Discrete(2)")
    return _popgym(name, text, spaces, "up to 200", (0.111, 1.0), "cartpole", noise_sigma=noise_sigma)


def _velocity_only_cartpole(level: str, length: int) -> EnvRow:
    name, text = f"VelocityOnlyCartPole{level}", "balance a pole, seeing velocities only"
    spaces, returns = ("Box(2)", "Discrete(2)"), (round(22.3 / length, 3), 1.0)
    return _popgym(name, text, spaces, f"up to {length}", returns, "cartpole", max_episode_length=length)


def _pendulum(level: str, length: int, chance: float, solved: float) -> EnvRow:
    name, text = f"PositionOnlyPendulum{level}", "swing a pendulum up without seeing its speed"
    spaces = ("Box(2)", "Box(1)")
    return _popgym(name, text, spaces, length, (chance, solved), "pendulum", max_episode_length=length)


def _noisy_pendulum(level: str, noise_sigma: float) -> EnvRow:
    name, text = (
        f"NoisyPositionOnlyPendulum{level}",
        f"swing a pendulum up, seeing its angle with noise of {noise_sigma}",
    )
    spaces = ("Box(2)", "Box(1)")
    return _popgym(name, text, spaces, 200, (0.244, 0.915), "pendulum", noise_sigma=noise_sigma)


def _multiarmed_bandit(level: str, arms: int, length: int, solved: float) -> EnvRow:
    name, text = f"MultiarmedBandit{level}", f"find the best of {arms} arms and pull it"
    spaces, kwargs = ("Discrete(2)", f"Discrete({arms})"), {"num_bandits": arms, "episode_length": length}
    return _popgym(name, text, spaces, length, (0.0, solved), "multiarmed_bandit", **kwargs)


def _higher_lower(level: str, num_decks: int, solved: float) -> EnvRow:
    name, text, spaces = f"HigherLower{level}", "is the next card higher or lower?", ("Discrete(13)", "Discrete(2)")
    return _popgym(name, text, spaces, 52 * num_decks - 1, (0.0, solved), "higher_lower", num_decks=num_decks)


def _autoencode(level: str, num_decks: int) -> EnvRow:
    name, text = f"Autoencode{level}", f"watch {52 * num_decks} cards, then name their suits in reverse order"
    spaces = ("Tuple(Discrete(2), Discrete(4))", "Discrete(4)")
    return _popgym(name, text, spaces, 104 * num_decks - 1, (-0.5, 1.0), "autoencode", num_decks=num_decks)


def _count_recall(level: str, num_decks: int, deck_type: str, kinds: int) -> EnvRow:
    name, text = f"CountRecall{level}", f"how many cards of a kind have been dealt ({deck_type})?"
    counts = 52 * num_decks // kinds + 1
    spaces, kwargs = (f"MultiDiscrete({kinds}, {kinds})", f"Discrete({counts})"), {"deck_type": deck_type}
    returns = (round(2 / counts - 1, 3), 1.0)
    return _popgym(name, text, spaces, 52 * num_decks - 1, returns, "count_recall", num_decks=num_decks, **kwargs)


def _concentration(level: str, num_decks: int, deck_type: str, kinds: int, chance: float) -> EnvRow:
    name, text, cards = f"Concentration{level}", f"turn up pairs of cards ({deck_type})", 52 * num_decks
    spaces, kwargs = (f"MultiDiscrete({cards} x {kinds + 1})", f"Discrete({cards})"), {"deck_type": deck_type}
    returns, length = (chance, 1.0), f"{cards} to {2 * cards}"
    return _popgym(name, text, spaces, length, returns, "concentration", num_decks=num_decks, **kwargs)


def _battleship(level: str, board_size: int, chance: float) -> EnvRow:
    name, text = f"Battleship{level}", f"sink four ships on a hidden board of {board_size} x {board_size}"
    spaces = ("Discrete(2)", f"MultiDiscrete({board_size}, {board_size})")
    return _popgym(name, text, spaces, f"12 to {board_size**2}", (chance, 1.0), "battleship", board_size=board_size)


def _minesweeper(level: str, board_size: int, num_mines: int, chance: float) -> EnvRow:
    name, text = f"MineSweeper{level}", f"avoid {num_mines} mines on a hidden board of {board_size} x {board_size}"
    spaces = (f"Discrete({num_mines + 1 if num_mines < 10 else 10})", f"MultiDiscrete({board_size}, {board_size})")
    length, kwargs = f"up to {board_size**2 - num_mines}", {"board_size": board_size, "num_mines": num_mines}
    return _popgym(name, text, spaces, length, (chance, 1.0), "minesweeper", **kwargs)


def _labyrinth(kind: str, level: str, size: int, chance: float, solved: float) -> EnvRow:
    text = "find the exit of a maze" if kind == "Escape" else "visit all cells of a maze"
    spaces, length = ("MultiDiscrete(10 x 5)", "Discrete(4)"), "up to 1023"
    return _popgym(f"Labyrinth{kind}{level}", text, spaces, length, (chance, solved), "labyrinth", maze_size=size)


CATALOG: tuple[EnvRow, ...] = (
    _repeat_previous("Easy", num_decks=1, k=4),
    _repeat_previous("Medium", num_decks=2, k=32),
    _repeat_previous("Hard", num_decks=3, k=64),
    _repeat_first("Easy", num_decks=1),
    _repeat_first("Medium", num_decks=8),
    _repeat_first("Hard", num_decks=16),
    _position_only_cartpole("Easy", max_episode_length=200),
    _position_only_cartpole("Medium", max_episode_length=400),
    _position_only_cartpole("Hard", max_episode_length=600),
    _noisy_cartpole("Easy", noise_sigma=0.1),
    _noisy_cartpole("Medium", noise_sigma=0.2),
    _noisy_cartpole("Hard", noise_sigma=0.3),
    _velocity_only_cartpole("Easy", length=200),
    _velocity_only_cartpole("Medium", length=400),
    _velocity_only_cartpole("Hard", length=600),
    _pendulum("Easy", length=200, chance=0.244, solved=0.915),
    _pendulum("Medium", length=150, chance=0.242, solved=0.887),
    _pendulum("Hard", length=100, chance=0.241, solved=0.83),
    _noisy_pendulum("Easy", noise_sigma=0.1),
    _noisy_pendulum("Medium", noise_sigma=0.2),
    _noisy_pendulum("Hard", noise_sigma=0.3),
    _multiarmed_bandit("Easy", arms=10, length=200, solved=0.818),
    _multiarmed_bandit("Medium", arms=20, length=400, solved=0.905),
    _multiarmed_bandit("Hard", arms=30, length=600, solved=0.935),
    _higher_lower("Easy", num_decks=1, solved=0.527),
    _higher_lower("Medium", num_decks=2, solved=0.516),
    _higher_lower("Hard", num_decks=3, solved=0.512),
    _autoencode("Easy", num_decks=1),
    _autoencode("Medium", num_decks=2),
    _autoencode("Hard", num_decks=3),
    _count_recall("Easy", num_decks=1, deck_type="colors", kinds=2),
    _count_recall("Medium", num_decks=2, deck_type="suits", kinds=4),
    _count_recall("Hard", num_decks=4, deck_type="ranks", kinds=13),
    _concentration("Easy", num_decks=1, deck_type="colors", kinds=2, chance=-0.191),
    _concentration("Medium", num_decks=2, deck_type="colors", kinds=2, chance=-0.186),
    _concentration("Hard", num_decks=1, deck_type="ranks", kinds=13, chance=-0.834),
    _battleship("Easy", board_size=8, chance=-0.45),
    _battleship("Medium", board_size=10, chance=-0.416),
    _battleship("Hard", board_size=12, chance=-0.399),
    _minesweeper("Easy", board_size=4, num_mines=2, chance=-0.234),
    _minesweeper("Medium", board_size=6, num_mines=6, chance=-0.402),
    _minesweeper("Hard", board_size=8, num_mines=10, chance=-0.433),
    _labyrinth("Escape", "Easy", size=10, chance=-0.418, solved=0.979),
    _labyrinth("Escape", "Medium", size=14, chance=-0.832, solved=0.965),
    _labyrinth("Escape", "Hard", size=18, chance=-0.955, solved=0.949),
    _labyrinth("Explore", "Easy", size=10, chance=-0.357, solved=0.983),
    _labyrinth("Explore", "Medium", size=14, chance=-0.613, solved=0.957),
    _labyrinth("Explore", "Hard", size=18, chance=-0.743, solved=0.919),
    EnvRow(
        id="holdfast/TMaze-v0",
        description="turn at the end of a corridor (`length` cells, 20) as a sign at its start showed",
        observation_space="Box(4)",
        action_space="Discrete(3)",
        episode_length="up to 3 x length",
        chance_return=0.0,
        solved_return=1.0,
        entry_point="holdfast.envs.t_maze:TMaze",
        kwargs={},
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
