"""Settings that solve a task, by name. A preset belongs to the algorithm that it names, PPO if it names none."""

from __future__ import annotations

from typing import Any

_EASY: dict[str, Any] = dict(
    hidden_size=64, num_envs=64, num_steps=64, epochs=4, minibatches=8, learning_rate=3e-3, normalize_obs=False,
    normalize_value=False,
)  # fmt: skip
_RECALL: dict[str, Any] = dict(
    core="window", hidden_size=64, num_envs=64, num_steps=128, epochs=4, minibatches=4, learning_rate=2e-3, gamma=0.3,
    gae_lambda=0.9, entropy_coef=0.003, normalize_obs=False, normalize_value=False,
)  # fmt: skip

# One reward in an episode. Advantages keep their size, which tells a reward from noise; with a small epsilon Adam moves anyway.
# A large entropy bonus keeps a policy walking that does not know the turn yet: with a small one it learns to be late (0) after
# the sign that it answers wrongly (-1), and stays there. It falls to 0, because the last turns are sampled too.
_MAZE: dict[str, Any] = dict(
    env="holdfast/TMaze-v0", hidden_size=64, epochs=4, minibatches=4, learning_rate=2e-3, gae_lambda=0.5, entropy_coef=0.02,
    entropy_schedule="linear", value_coef=0.01, adam_eps=1e-8, normalize_advantage=False,
)  # fmt: skip

# Common tasks of gymnasium: the defaults, and as many steps as they need with velocities hidden. A fall of CartPole costs much of
# its return, and the entropy bonus makes sampled actions fall now and then, so it ends at 0. Pendulum is more reliable so, too.
_GYMNASIUM: dict[str, dict[str, Any]] = {
    "cartpole": dict(env="CartPole-v1", total_steps=300_000, entropy_schedule="linear"),
    "acrobot": dict(env="Acrobot-v1", total_steps=100_000),
    "pendulum": dict(env="Pendulum-v1", total_steps=100_000, entropy_schedule="linear"),
    "mountain-car-continuous": dict(env="MountainCarContinuous-v0", total_steps=300_000),
    "lunar-lander": dict(env="LunarLander-v3", total_steps=1_000_000),
}


def _gymnasium_presets() -> dict[str, dict[str, Any]]:
    """Each task twice: "cartpole" as it is, "cartpole-masked" with its velocities hidden."""
    presets = {}
    for name, settings in _GYMNASIUM.items():
        presets[name] = dict(settings, core="gru")
        presets[f"{name}-masked"] = dict(presets[name], mask_velocity=True)
    return presets


PRESETS: dict[str, dict[str, Any]] = {
    "repeat-previous-easy": dict(
        _EASY, env="holdfast/RepeatPreviousEasy-v0", total_steps=300_000, gamma=0.6, gae_lambda=0.9
    ),
    "repeat-previous-medium": dict(
        _RECALL, env="holdfast/RepeatPreviousMedium-v0", total_steps=200_000, memory_span=32,
    ),
    "repeat-previous-hard": dict(
        _RECALL, env="holdfast/RepeatPreviousHard-v0", total_steps=300_000, memory_span=64,
    ),
    "repeat-first-easy": dict(
        _EASY, env="holdfast/RepeatFirstEasy-v0", total_steps=400_000, gamma=0.9, gae_lambda=0.9, memory_span=64
    ),
    "position-only-cartpole-easy": dict(
        env="holdfast/PositionOnlyCartPoleEasy-v0", total_steps=1_000_000, entropy_schedule="linear"
    ),
    "t-maze": dict(_MAZE, total_steps=500_000, num_envs=32, num_steps=128, memory_span=60),
    "t-maze-200": dict(
        _MAZE, env_kwargs={"length": 200}, core="lstm", total_steps=2_000_000, num_envs=16, num_steps=1024, memory_span=600,
    ),
    "higher-lower-easy": dict(
        _EASY, env="holdfast/HigherLowerEasy-v0", total_steps=1_000_000, gamma=0.9, gae_lambda=0.9, learning_rate=1e-3,
        memory_span=64,
    ),
    **_gymnasium_presets(),
}  # fmt: skip
