"""The size of rewards does not matter: CartPole with rewards x 0.001, x 1000 and + 10 per step is learned as before.

Slow (minutes): `make test-learning`. Other rewards round other bits, so a run is as good as one with another seed, and the median
of three counts. `tests/training/test_reward_scale.py` shows that it is rounding alone. After 100,000 steps runs differ by more than
that (324 to 500, docs/training.md), so these have twice as many.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest

import holdfast as hf
from holdfast.envs.observation_masks import VelocityMask
from learning.base_seed import BASE_SEED

EPISODE_LENGTH = 450
"""Asked of the mean over 100 fresh episodes; CartPole-v1 ends after 500 steps, and random actions last 22."""

SCALES: dict[str, Callable[[float], float]] = {
    "as it is": lambda r: r,
    "x 0.001": lambda r: 0.001 * r,
    "x 1000": lambda r: 1000 * r,
    "+ 10": lambda r: r + 10,
}


@pytest.mark.parametrize("name", SCALES)
def test_cartpole_is_learned_at_any_reward_scale(tmp_path: Path, name: str):
    change = SCALES[name]

    def make() -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(VelocityMask(gymnasium.make("CartPole-v1")), change)

    lengths = []
    for seed in range(3 * BASE_SEED, 3 * BASE_SEED + 3):
        config = hf.TrainConfig(
            env="CartPole-v1", core="gru", total_steps=200_000, seed=seed, device="cpu", threads=1, quiet=True,
            tensorboard=False, run_dir=str(tmp_path / f"seed{seed}"),
        )  # fmt: skip
        lengths.append(hf.Trainer(config, env=make).run().mean_return / change(1.0))
    assert statistics.median(lengths) >= EPISODE_LENGTH, lengths
