"""Velocity masks: velocities in observations set to 0, the classic way to make a task need memory."""

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
"""Which numbers of the observation are velocities, by the environment's name without its version."""


class VelocityMask(gym.ObservationWrapper[Any, Any, Any]):
    """Sets the velocities in the observations of a known environment to 0; the space stays as it is."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        name = env.spec.name if env.spec is not None else type(env.unwrapped).__name__
        require_known_velocities(name)
        self._velocities = list(VELOCITIES[name])

    def observation(self, observation: Any) -> Any:
        masked = np.array(observation)  # a copy: the environment may keep what it returned
        masked[self._velocities] = 0
        return masked


def require_known_velocities(name: str) -> None:
    """Raise unless it is known which observations of the environment called `name` are velocities."""
    if name not in VELOCITIES:
        raise ValueError(
            f"mask_velocity is not known for {name!r}, only for {', '.join(VELOCITIES)}; for another "
            "environment wrap it in a gymnasium.ObservationWrapper that zeroes its velocities, or use "
            "holdfast/PositionOnlyCartPoleEasy-v0"
        )
