"""Velocity masks set the velocities in observations to 0: the classic way to make a task need memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

VELOCITIES: dict[str, tuple[int, ...]] = {
    "CartPole": (1, 3),
    "MountainCar": (1,),
    "MountainCarContinuous": (1,),
    "Pendulum": (2,),
    "Acrobot": (4, 5),
    "LunarLander": (2, 3, 5),
    "LunarLanderContinuous": (2, 3, 5),
}
"""Which entries of the observation are velocities, by the environment's name without version."""


class VelocityMask(gym.ObservationWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Sets the velocities in the observations of a known environment to 0. The space does not change."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)  # so that the spec of the wrapped environment makes it again
        gym.ObservationWrapper.__init__(self, env)
        name = env.spec.name if env.spec is not None else type(env.unwrapped).__name__
        require_known_velocities(name)
        self._velocities = list(VELOCITIES[name])

    def observation(self, observation: Any) -> Any:
        masked = np.array(observation)  # a copy, because the environment may keep what it returned
        masked[self._velocities] = 0
        return masked


def require_known_velocities(name: str) -> None:
    """Raise a ValueError unless `VELOCITIES` lists the environment called `name`."""
    if name not in VELOCITIES:
        raise ValueError(
            f"mask_velocity is not known for {name!r}, only for {', '.join(VELOCITIES)}; wrap another "
            "environment in a gymnasium.ObservationWrapper that zeroes its velocities, or use "
            "holdfast/PositionOnlyCartPoleEasy-v0"
        )
