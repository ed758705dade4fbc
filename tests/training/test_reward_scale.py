"""The size of rewards does not matter: a factor that rounds nothing changes no bit of any weight, another one rounds alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest
import torch

import holdfast as hf


def weights_after(folder: Path, core: str, seed: int, change: Callable[[float], float]) -> dict[str, torch.Tensor]:
    """Of a short run in CartPole with other rewards; without what is in units of rewards."""

    def make() -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), change)

    config = hf.TrainConfig(
        env="CartPole-v1", core=core, hidden_size=16, num_envs=4, num_steps=64, total_steps=4 * 64 * 5, seed=seed, device="cpu",
        threads=1, run_dir=str(folder), quiet=True, tensorboard=False, final_eval_episodes=1,
    )  # fmt: skip
    trainer = hf.Trainer(config, env=make)
    trainer.run()
    return {name: weight for name, weight in trainer.policy.state_dict().items() if "value_scale" not in name}


def largest_difference(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys() and len(mine) > 6
    return max(float((mine[key] - theirs[key]).abs().max()) for key in mine)


@pytest.mark.parametrize(("core", "power", "seed"), [("gru", 10, 1), ("lstm", 100, 2), ("none", -100, 3)])
def test_rewards_times_a_power_of_two_change_no_bit_of_the_weights(tmp_path: Path, core: str, power: int, seed: int):
    usual = weights_after(tmp_path / "usual", core, seed, lambda r: r)
    large = weights_after(tmp_path / "large", core, seed, lambda r: 2.0**power * r)
    assert largest_difference(usual, large) == 0


@pytest.mark.parametrize(("factor", "seed"), [(1e-30, 4), (11.0, 5), (1e30, 6)])
def test_rewards_of_another_size_change_the_first_updates_by_rounding_alone(tmp_path: Path, factor: float, seed: int):
    usual = weights_after(tmp_path / "usual", "gru", seed, lambda r: r)
    scaled = weights_after(tmp_path / "scaled", "gru", seed, lambda r: factor * r)
    assert largest_difference(usual, scaled) < 2e-4
