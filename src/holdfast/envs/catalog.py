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


def _noisy_position_only_cartpole(level: str, noise_sigma: float) -> EnvRow:
    return EnvRow(
        id=f"holdfast/NoisyPositionOnlyCartPole{level}-v0",
        description=f"balance a pole, seeing positions with noise of {noise_sigma}",
        observation_space="Box(2)",
        action_space="Discrete(2)",
        episode_length="up to 200",
        chance_return=0.111,
        solved_return=1.0,
        entry_point="holdfast.envs.popgym.cartpole:NoisyPositionOnlyCartPole",
        kwargs={"noise_sigma": noise_sigma},
    )


def _velocity_only_cartpole(level: str, max_episode_length: int) -> EnvRow:
    return EnvRow(
        id=f"holdfast/VelocityOnlyCartPole{level}-v0",
        description="balance a pole, seeing velocities only",
        observation_space="Box(2)",
        action_space="Discrete(2)",
        episode_length=f"up to {max_episode_length}",
        chance_return=round(22.3 / max_episode_length, 3),
        solved_return=1.0,
        entry_point="holdfast.envs.popgym.cartpole:VelocityOnlyCartPole",
        kwargs={"max_episode_length": max_episode_length},
    )


def _multiarmed_bandit(level: str, num_bandits: int, episode_length: int, solved_return: float) -> EnvRow:
    return EnvRow(
        id=f"holdfast/MultiarmedBandit{level}-v0",
        description=f"find the best of {num_bandits} arms and pull it",
        observation_space="Discrete(2)",
        action_space=f"Discrete({num_bandits})",
        episode_length=str(episode_length),
        chance_return=0.0,
        solved_return=solved_return,
        entry_point="holdfast.envs.popgym.multiarmed_bandit:MultiarmedBandit",
        kwargs={"num_bandits": num_bandits, "episode_length": episode_length},
    )


def _higher_lower(level: str, num_decks: int, solved_return: float) -> EnvRow:
    return EnvRow(
        id=f"holdfast/HigherLower{level}-v0",
        description="guess whether the next card is higher or lower",
        observation_space="Discrete(13)",
        action_space="Discrete(2)",
        episode_length=str(52 * num_decks - 1),
        chance_return=0.0,
        solved_return=solved_return,
        entry_point="holdfast.envs.popgym.higher_lower:HigherLower",
        kwargs={"num_decks": num_decks},
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
    _noisy_position_only_cartpole("Easy", noise_sigma=0.1),
    _noisy_position_only_cartpole("Medium", noise_sigma=0.2),
    _noisy_position_only_cartpole("Hard", noise_sigma=0.3),
    _velocity_only_cartpole("Easy", max_episode_length=200),
    _velocity_only_cartpole("Medium", max_episode_length=400),
    _velocity_only_cartpole("Hard", max_episode_length=600),
    _multiarmed_bandit("Easy", num_bandits=10, episode_length=200, solved_return=0.818),
    _multiarmed_bandit("Medium", num_bandits=20, episode_length=400, solved_return=0.905),
    _multiarmed_bandit("Hard", num_bandits=30, episode_length=600, solved_return=0.935),
    _higher_lower("Easy", num_decks=1, solved_return=0.527),
    _higher_lower("Medium", num_decks=2, solved_return=0.516),
    _higher_lower("Hard", num_decks=3, solved_return=0.512),
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
            gym.register(row.id, vector_entry_point=row.entry_point, kwargs=dict(row.kwargs))
