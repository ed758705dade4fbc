"""Masks of observations: velocities, positions or unnamed entries are hidden, everything else stays."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import holdfast as hf
from holdfast.envs import KeepObs, PositionMask, VelocityMask, make
from holdfast.envs.observation_masks import LAYOUTS

# Positions, velocities and the rest, written from the environments' documentation. `None`: all that the other lists leave out.
EXPECTED = {
    "CartPole": ([0, 2], [1, 3], []),
    "MountainCar": ([0], [1], []),
    "MountainCarContinuous": ([0], [1], []),
    "Pendulum": ([0, 1], [2], []),
    "Acrobot": ([0, 1, 2, 3], [4, 5], []),
    "LunarLander": ([0, 1, 4, 6, 7], [2, 3, 5], []),
    "LunarLanderContinuous": ([0, 1, 4, 6, 7], [2, 3, 5], []),
    "BipedalWalker": ([0, 4, 6, 8, 9, 11, 13, *range(14, 24)], [1, 2, 3, 5, 7, 10, 12], []),
    "InvertedPendulum": ([0, 1], [2, 3], []),
    "InvertedDoublePendulum": ([0, 1, 2, 3, 4], [5, 6, 7], [8]),
    "Reacher": ([0, 1, 2, 3, 4, 5, 8, 9], [6, 7], []),
    "Swimmer": ([0, 1, 2], [3, 4, 5, 6, 7], []),
    "Pusher": ([*range(7), *range(14, 23)], [*range(7, 14)], []),
    "Hopper": ([*range(5)], [*range(5, 11)], []),
    "Walker2d": ([*range(8)], [*range(8, 17)], []),
    "HalfCheetah": ([*range(8)], [*range(8, 17)], []),
    "Ant": ([*range(13)], [*range(13, 27)], [*range(27, 105)]),
    "Humanoid": ([*range(22), *range(45, 175)], [*range(22, 45)], [*range(175, 348)]),
    "HopperBulletEnv": ([0, 1, 2, 6, 7, 8, 10, 12, 14], [3, 4, 5, 9, 11, 13], []),
    "Walker2DBulletEnv": ([0, 1, 2, 6, 7, 8, 10, 12, 14, 16, 18, 20, 21], [3, 4, 5, 9, 11, 13, 15, 17, 19], []),
    "HalfCheetahBulletEnv": (
        [0, 1, 2, 6, 7, 8, 10, 12, 14, 16, 18, 20, 21, 22, 23, 24, 25], [3, 4, 5, 9, 11, 13, 15, 17, 19], [],
    ),
    "AntBulletEnv": (
        [0, 1, 2, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 25, 26, 27], [3, 4, 5, 9, 11, 13, 15, 17, 19, 21, 23], [],
    ),
}  # fmt: skip
MUJOCO = list(EXPECTED)[8:18]


class Flat(gym.Env):
    """Shows ones, in the shape that it is given."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape=(6,)):
        self.observation_space = gym.spaces.Box(-2, 2, shape)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(self.observation_space.shape, np.float32), {}

    def step(self, action):
        return np.ones(self.observation_space.shape, np.float32), 0.0, False, False, {}


def _flat(name: str, size: int) -> gym.Env:
    env = Flat((size,))
    env.spec = gym.envs.registration.EnvSpec(f"{name}-v0", entry_point=Flat)
    return env


def _kept(env: gym.Env) -> list[int]:
    return np.flatnonzero(env.reset()[0]).tolist()


def test_the_masks_of_every_known_environment_keep_what_its_documentation_calls_positions_and_velocities():
    assert LAYOUTS.keys() == EXPECTED.keys()
    for name, (positions, velocities, mixed) in EXPECTED.items():
        assert sorted(positions + velocities + mixed) == list(range(LAYOUTS[name].size)), name
        assert _kept(VelocityMask(_flat(name, LAYOUTS[name].size))) == positions, name
        assert _kept(PositionMask(_flat(name, LAYOUTS[name].size))) == velocities, name


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1"]
)
@pytest.mark.parametrize("mask", ["mask_velocity", "mask_position"])
def test_what_a_mask_hides_is_zero_and_everything_else_stays(name, mask):
    masked, plain = make(name, 2, seed=0, **{mask: True}), make(name, 2, seed=0)
    assert masked.single_observation_space == plain.single_observation_space
    positions, velocities, _ = EXPECTED[name[:-3]]
    kept, hidden = (positions, velocities) if mask == "mask_velocity" else (velocities, positions)
    seen, true = masked.reset()[0], plain.reset()[0]
    for _ in range(20):
        assert (seen[:, hidden] == 0).all()
        assert np.array_equal(seen[:, kept], true[:, kept])
        actions = plain.action_space.sample()
        seen, true = masked.step(actions)[0], plain.step(actions)[0]
    assert (true[:, hidden] != 0).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MUJOCO)
def test_mujocos_kept_positions_do_not_depend_on_velocities_nor_kept_velocities_on_positions(name):
    pytest.importorskip("mujoco")
    env = gym.make(f"{name}-v5")
    positions, velocities = VelocityMask(env), PositionMask(env)
    env.reset(seed=0)
    for _ in range(8):
        env.step(np.zeros(env.action_space.shape, np.float32))
    inside, random = env.unwrapped, np.random.default_rng(0)
    qpos, qvel = inside.data.qpos.copy(), inside.data.qvel.copy()

    def seen(qpos, qvel):
        inside.set_state(qpos, qvel)
        observation = inside._get_obs()
        return observation, positions.observation(observation), velocities.observation(observation)

    whole, before_q, before_v = seen(qpos, qvel)
    for _ in range(5):
        _, after_q, after_v = seen(qpos, qvel + 0.1 * random.normal(size=qvel.shape))
        assert np.array_equal(after_q, before_q) and not np.array_equal(after_v, before_v)
        _, after_q, after_v = seen(qpos + 0.03 * random.normal(size=qpos.shape), qvel)
        assert np.array_equal(after_v, before_v) and not np.array_equal(after_q, before_q)
    moves = {i for i in range(len(whole)) if before_q[i] != 0 or before_v[i] != 0}
    assert moves <= set(EXPECTED[name][0]) | set(EXPECTED[name][1])


PAIRS = {  # an angle or a place, and its velocity
    "LunarLander-v3": [(0, 2), (1, 3), (4, 5)],
    "BipedalWalker-v3": [(0, 1), (4, 5), (6, 7), (9, 10), (11, 12)],
    "HopperBulletEnv-v0": [(joint, joint + 1) for joint in range(8, 14, 2)],
    "Walker2DBulletEnv-v0": [(joint, joint + 1) for joint in range(8, 20, 2)],
    "HalfCheetahBulletEnv-v0": [(joint, joint + 1) for joint in range(8, 20, 2)],
    "AntBulletEnv-v0": [(joint, joint + 1) for joint in range(8, 24, 2)],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_a_hidden_velocity_is_the_change_of_a_kept_position(name):
    for package in ("pybullet_envs_gymnasium",) if "Bullet" in name else ("Box2D", "pygame"):
        pytest.importorskip(package)
    env = gym.make(name)
    assert env.observation_space.shape == (LAYOUTS[env.spec.name].size,)
    env.action_space.seed(0)
    rows, changes = [env.reset(seed=0)[0]], []
    for action in [env.action_space.sample() for _ in range(50) for _ in range(4)]:
        row, _, ended, cut, _ = env.step(action)
        changes.append((row - rows[-1], row))
        rows.append(env.reset()[0] if ended or cut else row)
    moved, after = (np.array(part) for part in zip(*changes, strict=True))
    positions, velocities, _ = EXPECTED[env.spec.name]
    for position, velocity in PAIRS[name]:
        assert position in positions and velocity in velocities
        assert np.corrcoef(moved[:, position], after[:, velocity])[0, 1] > 0.6, (position, velocity)


def test_keep_obs_hides_all_but_the_entries_that_it_names():
    assert _kept(KeepObs(Flat((9,)), ("0:3", 7))) == [0, 1, 2, 7]
    assert _kept(KeepObs(Flat((9,)), ("7:",))) == [7, 8]
    assert _kept(KeepObs(Flat((9,)), (":4:2",))) == [0, 2]
    env = make("Pendulum-v1", 3, seed=0, keep_obs=("0:1", "2"))
    seen, true = env.reset(seed=1)[0], make("Pendulum-v1", 3).reset(seed=1)[0]
    assert np.array_equal(seen, true * np.array([1, 0, 1], np.float32))


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (("x",), "keep_obs='x': expected numbers and slices from 0 on, such as 7, 0:5 or 8:"),
        (("-1",), "keep_obs='-1': expected numbers and slices"),
        (("6",), "keep_obs='6': an observation has the entries 0 to 5"),
        (("2:9",), "keep_obs='2:9': an observation has the entries 0 to 5"),
        (("3:3",), "keep_obs='3:3': an observation has the entries 0 to 5"),
    ],
)
def test_entries_that_are_not_there_are_refused_in_one_line(keep, words):
    with pytest.raises(ValueError, match=words) as refused:
        make(Flat, 2, keep_obs=keep)
    assert "\n" not in str(refused.value)


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"mask_position is not known for 'Blackjack', only for CartPole, .*keep_obs="):
        make("Blackjack-v1", 2, mask_position=True)
    with pytest.raises(ValueError, match=r"keep_obs needs a flat observation, .* this is Box\(-2.0, 2.0, \(4, 4\)"):
        make(Flat, 2, env_kwargs={"shape": (4, 4)}, keep_obs=("0",))
    with pytest.raises(ValueError, match="mask_velocity and keep_obs hide different entries; use one of them"):
        make("CartPole-v1", 2, mask_velocity=True, keep_obs=("0",))
    with pytest.raises(
        ValueError, match=r"mask_velocity knows observations of Ant with 105 entries, here .* shape \(27,\)"
    ):
        VelocityMask(_flat("Ant", 27))
    for vector in ("holdfast/PositionOnlyCartPoleEasy-v0", lambda num_envs: None):
        with pytest.raises(
            ValueError, match="mask_velocity, mask_position and keep_obs need an environment that is made one"
        ):
            make(vector, 2, mask_velocity=True)


@pytest.mark.filterwarnings("ignore:.*WARN")
@pytest.mark.parametrize("mask", [VelocityMask, PositionMask, lambda env: KeepObs(env, ["0:1"])])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_gymnasiums_checker_passes_and_the_spec_makes_the_masked_environment_again(env_id, mask):
    env = mask(gym.make(env_id))
    check_env(env, skip_render_check=True)
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert type(again) is type(env) and again.spec == env.spec
    assert np.array_equal(again.reset(seed=4)[0], env.reset(seed=4)[0])


@pytest.mark.parametrize(
    ("mask", "name", "words"),
    [
        ({"mask_velocity": True}, "mask-velocity", "velocities hidden"),
        ({"mask_position": True}, "mask-position", "positions hidden"),
        ({"keep_obs": ("0:2", "3")}, "keep0_2-3", "all but entries 0:2 3 hidden"),
    ],
)
def test_a_run_records_its_mask_and_evaluates_with_it(tmp_path: Path, mask, name, words):
    config = hf.TrainConfig(
        env="CartPole-v1", core="gru", hidden_size=8, total_steps=64, num_envs=2, num_steps=16, **mask
    )
    assert config.automatic_name == f"gru-h8-{name}-seed1"
    assert hf.TrainConfig.from_dict(config.to_dict()) == config
    assert config.hidden[0] == words and config.without_env_options().hidden is None
    env = make(config.env, 1, **config.env_options)
    kept = np.flatnonzero(env.step(env.action_space.sample() if env.reset(seed=0) else None)[0][0]).tolist()
    assert kept == {"mask-velocity": [0, 2], "mask-position": [1, 3]}.get(name, [0, 1, 3])
