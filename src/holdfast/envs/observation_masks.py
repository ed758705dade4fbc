"""Masks set entries of flat observations to 0: velocities, positions, or all but those that are named.

This is the classic way to make a task need memory. The observation space does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from holdfast.config.run import checked_entries
from holdfast.config.settings import given, named
from holdfast.data_files import read_toml


class Layout(NamedTuple):
    """What the entries of an observation are. Entries in neither list are positions: they depend on nothing else."""

    size: int
    velocities: str  # as in `keep_obs`
    mixed: str = ""  # forces, and velocities in a frame that depends on positions; hidden by both masks


LAYOUTS = {name: Layout(*told) for name, told in read_toml(__file__, "observation_layouts.toml").items()}
"""By the environment's name without version; MuJoCo's as in v5."""

Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]


def wrapper(mask_velocity: bool, mask_position: bool, keep_obs: Sequence[str | int]) -> Wrapper | None:
    """The wrapper that these settings ask for; None without any of them."""
    masks = {"mask_velocity": mask_velocity, "mask_position": mask_position, "keep_obs": keep_obs}
    asked = [name for name, value in masks.items() if value]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(map(named, asked))} hide different entries; use one of them")
    if keep_obs:
        return partial(KeepObs, entries=tuple(keep_obs))
    return VelocityMask if mask_velocity else PositionMask if mask_position else None


def require_single(mask: Wrapper | None) -> None:
    """Raise a ValueError for a wrapper of single environments around one whose copies are not made one at a time."""
    if mask is not None:
        *others, last = map(named, ("trial_episodes", "mask_velocity", "mask_position", "keep_obs"))
        raise ValueError(
            f"{', '.join(others)} and {last} need an environment that is made one copy at a time, this one is a vector environment"
        )


class _Mask(gym.ObservationWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    def __init__(self, env: gym.Env[Any, Any], hidden: Sequence[int], **arguments: Any) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, **arguments)  # the spec of the wrapped environment rebuilds it
        gym.ObservationWrapper.__init__(self, env)
        self._hidden = list(hidden)

    def observation(self, observation: Any) -> Any:
        masked = np.array(observation)  # a copy, because the environment may keep what it returned
        masked[self._hidden] = 0
        return masked


class VelocityMask(_Mask):
    """Sets the velocities in the observations of a known environment to 0, and forces, which depend on them."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        layout = _layout_of(env, "mask_velocity")
        super().__init__(env, [*_entries(layout.velocities, layout.size), *_entries(layout.mixed, layout.size)])


class PositionMask(_Mask):
    """Sets everything but the velocities in the observations of a known environment to 0."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        layout = _layout_of(env, "mask_position")
        super().__init__(env, _others(_entries(layout.velocities, layout.size), layout.size))


class KeepObs(_Mask):
    """Sets everything but some entries of a flat observation to 0. entries: numbers and slices, such as ("0:5", 7)."""

    def __init__(self, env: gym.Env[Any, Any], entries: Sequence[str | int]) -> None:
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"{named('keep_obs')} needs a flat observation, a Box with one dimension; this is {space}")
        kept = _entries(" ".join(checked_entries(entries)), space.shape[0])
        super().__init__(env, _others(kept, space.shape[0]), entries=list(entries))


def _layout_of(env: gym.Env[Any, Any], mask: str) -> Layout:
    name = env.spec.name if env.spec is not None else type(env.unwrapped).__name__
    other = f"name the entries to keep instead, such as {given('keep_obs', ('0:5', '7'))}"
    if name not in LAYOUTS:
        raise ValueError(f"{named(mask)} is not known for {name!r}, only for {', '.join(LAYOUTS)}; {other}")
    shape = env.observation_space.shape
    if shape != (LAYOUTS[name].size,):
        raise ValueError(
            f"{named(mask)} knows observations of {name} with {LAYOUTS[name].size} entries, here they are of shape {shape}; "
            f"{other}"
        )
    return LAYOUTS[name]


def _entries(text: str, size: int) -> list[int]:
    """
    >>> _entries("0:3 7 8:", 10), _entries("1::2", 6)
    ([0, 1, 2, 7, 8, 9], [1, 3, 5])
    """
    found: list[int] = []
    for part in text.split():
        first, *rest = (int(number) if number else None for number in part.split(":"))
        chosen = range(size)[slice(first, *rest)] if rest else range(first or 0, (first or 0) + 1)
        if not chosen or chosen[-1] >= size or (rest and (rest[0] or 0) > size):
            raise ValueError(f"{given('keep_obs', part)}: an observation has the entries 0 to {size - 1}")
        found += chosen
    return found


def _others(kept: Sequence[int], size: int) -> list[int]:
    return sorted(set(range(size)) - set(kept))
