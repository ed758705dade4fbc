"""An environment that breaks gymnasium's interface: one line that names the rule, and no rebuild."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import holdfast as hf
from holdfast.rollout.env_failures import BrokenEnvError, EnvFailedError


class Steps(gym.Env[Any, Any]):
    """Twenty steps of reward 1."""

    observation_space: Any = spaces.Box(-1, 1, (3,), np.float32)
    action_space: Any = spaces.Discrete(2)
    time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self.seen(), 1.0, self.time >= 20, False, {}

    def seen(self) -> Any:
        return np.zeros(3, np.float32)


class TakesNoSeed(Steps):
    def reset(self) -> Any:  # type: ignore[override]
        return self.seen(), {}


class ResetsWithoutInfo(Steps):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.seen()


class StepsAsInOldGym(Steps):
    def step(self, action: Any) -> Any:
        return self.seen(), 1.0, False, {}


class RewardsWithArrays(Steps):
    def step(self, action: Any) -> Any:
        return self.seen(), np.ones(2), False, False, {}


class GrowsInStepEleven(Steps):
    def seen(self) -> Any:
        return np.zeros(4 if self.time == 11 else 3, np.float32)


class GrowsInADict(Steps):
    observation_space = spaces.Dict(place=spaces.Box(-1, 1, (3,), np.float32))

    def seen(self) -> Any:
        return {"place": np.zeros(2, np.float32)}


def train(env: Any, folder: Path, **settings: Any) -> hf.TrainConfig:
    config = hf.TrainConfig(
        run_dir=str(folder), total_steps=128, num_envs=2, num_steps=32, hidden_size=8, quiet=True, tensorboard=False,
        final_eval_episodes=2, **settings,
    )  # fmt: skip
    hf.Trainer(config, env=env).run()
    return config


@pytest.mark.parametrize("vectorization", ["sync", "async", "workers"])
@pytest.mark.parametrize(
    ("env", "rule"),
    [
        (TakesNoSeed, "reset.. takes no seed"),
        (ResetsWithoutInfo, "reset.. must return two things"),
        (StepsAsInOldGym, "step.. must return five things"),
        (GrowsInStepEleven, r"observation.* shape \(4,\).*\(3,\)"),
    ],
)
def test_the_rule_is_named_and_nothing_is_rebuilt(env: type, rule: str, vectorization: str, tmp_path: Path):
    with pytest.raises(BrokenEnvError, match=rule):
        train(env, tmp_path / "run", vectorization=vectorization)
    assert (tmp_path / "run/env_failures-rank0.txt").read_text().count("--- failure") == 1


@pytest.mark.parametrize(
    ("env", "rule"), [(RewardsWithArrays, "reward as one number"), (GrowsInADict, r"observation\['place'\] has shape")]
)
def test_rewards_and_parts_of_observations_are_named_too(env: type, rule: str, tmp_path: Path):
    with pytest.raises(BrokenEnvError, match=rule):
        train(env, tmp_path / "run")


class RewardsWithNone(Steps):
    def step(self, action: Any) -> Any:
        return self.seen(), None, False, False, {}


@pytest.mark.parametrize("vectorization", ["sync", "async", "workers"])
def test_none_is_no_reward(vectorization: str, tmp_path: Path):
    with pytest.raises(BrokenEnvError, match="must return the reward as one number, got None"):
        train(RewardsWithNone, tmp_path / "run", vectorization=vectorization)


def test_an_error_of_the_environments_own_is_no_broken_rule(tmp_path: Path):
    class Unlucky(Steps):
        def step(self, action: Any) -> Any:
            _, _ = (1, 2, 3)  # type: ignore[misc]

    with pytest.raises(EnvFailedError, match="failed 3 times, 2 allowed") as caught:
        train(Unlucky, tmp_path / "run", max_env_failures=2)
    assert not isinstance(caught.value, BrokenEnvError)


def test_an_observation_outside_a_discrete_space_names_both(tmp_path: Path):
    class Sees7(Steps):
        observation_space = spaces.Discrete(3, start=1)

        def seen(self) -> Any:
            return 7

    with pytest.raises(ValueError, match="got 7 to 7, observation_space allows 1 to 3"):
        train(Sees7, tmp_path / "run")


def test_episodes_that_never_end_end_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Endless(Steps):
        def step(self, action: Any) -> Any:
            return self.seen(), 1.0, False, False, {}

    monkeypatch.setattr("holdfast.training.trainer.MOST_EVALUATION_STEPS", 100)
    config = hf.TrainConfig(
        run_dir=str(tmp_path), total_steps=64, num_envs=2, num_steps=32, hidden_size=8, quiet=True, tensorboard=False
    )
    result = hf.Trainer(config, env=Endless).run()
    assert result.episodes == 0 and np.isnan(result.mean_return)
