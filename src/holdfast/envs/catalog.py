"""The environments that come with Holdfast: ids, descriptions, and registration with gymnasium. `catalog.toml` lists them.

Importing this module imports neither torch nor `gymnasium.vector`. The environments themselves are one file each; to
write one, start at `base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from holdfast.data_files import read_toml


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


CATALOG = tuple(
    EnvRow(*(f"holdfast/{name}-v0", *told, f"holdfast.envs.{task}", kwargs))
    for name, task, *told, kwargs in read_toml(__file__, "catalog.toml")["envs"]
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
