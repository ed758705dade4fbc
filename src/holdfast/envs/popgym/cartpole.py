"""CartPole seen through noise, and CartPole of which only velocities are seen.

The motion, rewards and ends are those of `PositionOnlyCartPole`, the rules those of POPGym's environments of these names.
"""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box
from torch import Tensor

from holdfast.envs.popgym.noise import NoisyPosition
from holdfast.envs.position_only_cartpole import PositionOnlyCartPole


class NoisyPositionOnlyCartPole(NoisyPosition, PositionOnlyCartPole):
    """Observation: cart position and pole angle, each plus Gaussian noise, clipped to the observation space."""

    def first_obs(self, draws: Tensor) -> Tensor:
        return self._with_noise(draws[:, :2], draws[:, 4:6])

    def next_obs(self, places: Tensor, speeds: Tensor, draws: Tensor) -> Tensor:
        return self._with_noise(places, draws[:, 6:])

    def _with_noise(self, places: Tensor, noise: Tensor) -> Tensor:
        return (places.float() + noise.float()).clamp(-self._high, self._high)


class VelocityOnlyCartPole(PositionOnlyCartPole):
    """Observation: velocities of cart and pole. The first observation of an episode shows position and angle instead, as
    POPGym's does; without them the cart's place on the track could not be known.
    """

    def seen_space(self) -> Box:
        return Box(-np.inf, np.inf, (2,), dtype=np.float32)

    def next_obs(self, places: Tensor, speeds: Tensor, draws: Tensor) -> Tensor:
        return speeds.float()
