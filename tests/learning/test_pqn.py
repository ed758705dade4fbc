"""PQN with a GRU learns what PPO does. Slow (minutes): `make test-learning`."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as hf
from learning.base_seed import BASE_SEED


@pytest.mark.parametrize(
    ("settings", "score"),
    [
        ({"env": "holdfast/RepeatPreviousEasy-v0", "total_steps": 500_000}, 0.95),
        ({"env": "CartPole-v1", "mask_velocity": True, "total_steps": 1_000_000}, 450),
    ],
    ids=["repeat-previous", "masked-cartpole"],
)
def test_four_of_five_seeds_learn(tmp_path: Path, settings: dict[str, object], score: float):
    scores = []
    for seed in range(5 * BASE_SEED, 5 * BASE_SEED + 5):
        config = hf.PQNConfig(
            **settings, core="gru", seed=seed, device="cpu", threads=1, quiet=True, tensorboard=False,
            run_dir=str(tmp_path / f"seed{seed}"),
        )  # fmt: skip
        scores.append(hf.Trainer(config).run().mean_return)
        print(f"seed {seed}: {scores[-1]:.4g}")
    assert sum(found >= score for found in scores) >= 4, scores
