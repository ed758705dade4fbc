"""The environments that come with Holdfast: ids, descriptions, and registration with gymnasium.

Importing this module imports neither torch nor `gymnasium.vector`. The environments themselves are one file each; to
write one, start at `base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import gymnasium as gym


@dataclass(frozen=True)
class EnvRow:
    """One line of `holdfast envs`. Returns are means over episodes: with random actions, and the best possible."""

    id: str
    description: str
    observation_space: str
    action_space: str
    episode_length: str
    chance_return: float
    solved_return: float
    entry_point: str = field(repr=False)
    kwargs: dict[str, int] = field(repr=False)


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
