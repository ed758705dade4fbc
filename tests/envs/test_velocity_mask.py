"""Velocity masks: velocities are hidden, everything else stays."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from holdfast.envs import VelocityMask, make


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


@pytest.mark.filterwarnings("ignore:.*WARN")
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_gymnasiums_checker_passes_and_the_spec_makes_the_masked_environment_again(env_id):
    env = VelocityMask(gym.make(env_id))
    check_env(env, skip_render_check=True)
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert isinstance(again, VelocityMask) and again.spec == env.spec
    assert np.array_equal(again.reset(seed=4)[0], env.reset(seed=4)[0])
