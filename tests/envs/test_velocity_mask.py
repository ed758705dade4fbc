"""Velocity masks: velocities are hidden, everything else stays."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.envs import make


@pytest.mark.parametrize(
    ("env_id", "velocities"),
    [
        ("CartPole-v1", [1, 3]),
        ("MountainCar-v0", [1]),
        ("MountainCarContinuous-v0", [1]),
        ("Pendulum-v1", [2]),
        ("Acrobot-v1", [4, 5]),
    ],
)
def test_velocities_and_nothing_else_are_masked(env_id, velocities):
    masked, plain = make(env_id, 2, seed=0, mask_velocity=True), make(env_id, 2, seed=0)
    assert masked.single_observation_space == plain.single_observation_space
    seen, true = masked.reset()[0], plain.reset()[0]
    kept = [i for i in range(seen.shape[1]) if i not in velocities]
    for _ in range(20):
        assert (seen[:, velocities] == 0).all()
        assert np.array_equal(seen[:, kept], true[:, kept])
        actions = plain.action_space.sample()
        seen, true = masked.step(actions)[0], plain.step(actions)[0]
    assert (true[:, velocities] != 0).all()


@pytest.mark.parametrize("env_id", ["holdfast/PositionOnlyCartPoleEasy-v0", "Blackjack-v1"])
def test_masking_the_velocity_of_an_unknown_environment_is_refused(env_id):
    with pytest.raises(ValueError, match=r"mask_velocity is not known for .*only for CartPole, MountainCar"):
        make(env_id, 2, mask_velocity=True)
