"""`Trainer(env=..., policy=...)` with one's own: what is accepted, what the run records, what is asked for again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode

import holdfast as hf
from counting_env import CountingEnv, SumPolicy, vector_env
from holdfast.display.first_lines import first_lines
from holdfast.policies.base import RecurrentPolicy
from holdfast.runs import saved_policy
from holdfast.runs.checkpoint import CheckpointError

TWO = ({"unit": 0.1, "lengths": (3,)}, {"unit": 0.2, "lengths": (2,)})


def config(folder: Path, **settings: Any) -> hf.TrainConfig:
    small = dict(
        hidden_size=8, num_envs=2, num_steps=8, minibatches=1, epochs=1, total_steps=2 * 8 * 2, final_eval_episodes=2,
        tensorboard=False, quiet=True, device="cpu", threads=1, run_dir=str(folder / "run"),
    )  # fmt: skip
    return hf.TrainConfig(**{**small, **settings})


class NamedPolicy(SumPolicy):
    """Takes what it names."""

    def __init__(self, observation_space: Any, config: hf.TrainConfig, slope: float = 0.02) -> None:
        super().__init__(slope)
        self.seen, self.made_for = observation_space, config.num_envs


# --- environments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 6])
def test_every_way_to_name_an_environment_trains_alike(tmp_path: Path, seed: int):
    ways: dict[str, Any] = {
        "id": "CartPole-v1",
        "class": CartPoleEnv,
        "function": partial(gym.make, "CartPole-v1"),
        "one": gym.make("CartPole-v1"),
        "vector": gym.make_vec(
            "CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
        ),
    }
    weights = []
    for name, env in ways.items():
        trainer = hf.Trainer(config(tmp_path / name, seed=seed), env=env)
        trainer.run()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.policy.parameters()]))
    assert all(torch.equal(weights[0], other) for other in weights[1:])


def test_a_run_records_what_it_was_trained_on(tmp_path: Path):
    for name, env, recorded in (
        ("id", "CartPole-v1", "CartPole-v1"),
        ("class", CountingEnv, "counting_env:CountingEnv"),
        ("function", lambda: CountingEnv(), "own-env:lambda"),
        ("one", CountingEnv(), "own-env:CountingEnv"),
        ("vector", vector_env(AutoresetMode.SAME_STEP, *TWO), "own-env:SyncVectorEnv"),
    ):
        asked = config(tmp_path / name, env="holdfast/TMaze-v0")
        trainer = hf.Trainer(asked, env=env)
        trainer.run()
        assert hf.TrainConfig.load(tmp_path / name / "run" / "config.json").env == recorded == trainer.config.env
        assert asked.env == "holdfast/TMaze-v0", "the caller's config is left alone"


def test_arguments_of_the_configs_environment_are_not_recorded_for_one_that_is_already_made(tmp_path: Path):
    settings = config(tmp_path, env="holdfast/TMaze-v0", env_kwargs={"length": 3})
    assert hf.Trainer(settings, env=vector_env(AutoresetMode.SAME_STEP, *TWO)).config.env_kwargs == {}


def test_a_run_is_not_resumed_in_an_environment_with_other_spaces(tmp_path: Path):
    hf.Trainer(config(tmp_path, env="CartPole-v1")).run()
    with pytest.raises(CheckpointError, match=r"observation_space is Box.*\(6,\).*, and the policy was made for Box"):
        hf.Trainer.resume(tmp_path / "run", env=lambda: gym.make("Acrobot-v1"), total_steps=64)


def test_a_run_on_an_object_asks_for_it_again_when_resumed(tmp_path: Path):
    hf.Trainer(config(tmp_path), env=vector_env(AutoresetMode.SAME_STEP, *TWO)).run()
    with pytest.raises(ValueError, match=r"Trainer\(env=\.\.\.\) was given \(SyncVectorEnv\).*pass it again with env="):
        hf.Trainer.resume(tmp_path / "run", total_steps=64)
    resumed = hf.Trainer.resume(tmp_path / "run", env=vector_env(AutoresetMode.SAME_STEP, *TWO), total_steps=64)
    assert resumed.run().steps == 64


def test_a_run_on_a_class_that_can_be_imported_asks_for_nothing(tmp_path: Path):
    hf.Trainer(config(tmp_path, env_kwargs={"unit": 0.1}), env=CountingEnv).run()
    assert hf.Trainer.resume(tmp_path / "run", total_steps=64).run().steps == 64


def test_evaluation_during_training_makes_more_of_a_class_and_needs_another_for_an_object(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path / "class", eval_every=1, eval_episodes=2), env=CountingEnv)
    trainer.run()
    assert trainer.eval_env is not trainer.env
    with pytest.raises(ValueError, match="pass eval_env="):
        hf.Trainer(config(tmp_path / "object", eval_every=1), env=CountingEnv())
    hf.Trainer(config(tmp_path / "object", eval_every=1), env=CountingEnv(), eval_env=CountingEnv).run()


@pytest.mark.parametrize("wrong", [3, object(), [CountingEnv()], torch.zeros(2)])
def test_what_is_no_environment_is_refused_in_one_line(tmp_path: Path, wrong: Any):
    with pytest.raises(TypeError, match=r"neither a gymnasium nor a vector environment .*; expected an id") as error:
        hf.Trainer(config(tmp_path), env=wrong)
    assert "\n" not in str(error.value)


def test_an_environment_made_by_a_function_is_rebuilt_when_it_fails(tmp_path: Path):
    made = []

    def flaky() -> CountingEnv:
        env = CountingEnv(unit=0.1, lengths=(4,))
        made.append(env)
        if len(made) == 2:
            env.step = lambda action: 1 / 0  # type: ignore[method-assign]
        return env

    trainer = hf.Trainer(config(tmp_path), env=flaky)
    trainer.run()
    assert trainer.env_failures.count == 1


# --- policies ---------------------------------------------------------------------------------------------------------


def test_a_policy_class_is_made_with_what_it_names_recorded_and_loaded_again(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path), env=CountingEnv, policy=NamedPolicy)
    trainer.run()
    assert trainer.policy.made_for == 2 and trainer.policy.seen == trainer.env.single_observation_space
    name = f"{NamedPolicy.__module__}:NamedPolicy"
    assert hf.TrainConfig.load(tmp_path / "run" / "config.json").policy == name
    loaded = hf.load(tmp_path / "run")
    assert isinstance(loaded, RecurrentPolicy) and type(loaded).__name__ == "NamedPolicy"
    assert torch.equal(loaded.slope, trainer.policy.slope)
    assert hf.Trainer.resume(tmp_path / "run", total_steps=64).run().steps == 64


def test_a_policy_object_is_asked_for_again_and_may_come_as_a_class(tmp_path: Path):
    hf.Trainer(config(tmp_path), env=CountingEnv, policy=SumPolicy(0.05)).run()
    with pytest.raises(ValueError, match=r"your own policy: pass it.*--policy module:Name"):
        hf.load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"your own policy: pass it.*--policy module:Name"):
        hf.Trainer.resume(tmp_path / "run", total_steps=64)
    by_class, by_object = hf.load(tmp_path / "run", SumPolicy), hf.load(tmp_path / "run", SumPolicy())
    assert torch.equal(by_class.slope, by_object.slope)
    resumed = hf.Trainer.resume(tmp_path / "run", policy=SumPolicy, total_steps=64)
    resumed.run()
    assert type(hf.load(tmp_path / "run")).__name__ == "SumPolicy", "the resumed run knows its name"


def test_a_run_with_a_policy_object_says_so_and_is_not_rerun_without_it(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path), env=CountingEnv, policy=SumPolicy(0.05))
    trainer.run()
    assert trainer.config.policy == "own-policy:SumPolicy" and trainer.config.automatic_name.startswith("SumPolicy-")
    assert first_lines(trainer.config, {})[1] == "policy  SumPolicy, your own"
    recorded = hf.TrainConfig.load(tmp_path / "run" / "config.json")
    with pytest.raises(
        ValueError, match=r"trained with a policy that Trainer\(policy=\.\.\.\) was given \(SumPolicy\)"
    ):
        hf.Trainer(replace(recorded, run_dir=str(tmp_path / "again")), env=CountingEnv)


def test_a_space_that_cannot_be_saved_does_not_keep_an_own_policy_from_training(tmp_path: Path):
    class Words(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gym.spaces.Discrete(2)

    trainer = hf.Trainer(config(tmp_path), env=Words, policy=SumPolicy)
    trainer.collector.adapter.observation_space = gym.spaces.Text(3)
    trainer.run()
    with pytest.raises(CheckpointError, match="does not say what its policy observes: pass an instance"):
        hf.load(tmp_path / "run")
    assert saved_policy.spaces(saved_policy.read(tmp_path / "run")[1]) == (None, None)


class NeedsMore(SumPolicy):
    def __init__(self, width: int) -> None:
        super().__init__()


ONE_POLICY = SumPolicy()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (NeedsMore, "policy NeedsMore needs the argument 'width'; it can have observation_space, action_space, config"),
        (dict, "policy dict made an object of type dict, expected a class or function that makes an hf.Rec"),
        (
            "counting_env:NoPolicy",
            "policy 'counting_env:NoPolicy': counting_env has no NoPolicy; did you mean SumPolicy?",
        ),
        ("counting_env", "expected module:Name"),
        ("counting_env:MODES", "policy counting_env:MODES is of type tuple, expected a class or function"),
        (
            f"{__name__}:ONE_POLICY",
            "ONE_POLICY is of type SumPolicy, expected a class or function that makes an hf.Rec",
        ),
        (7, "policy 7 is of type int, expected a class or function"),
        (
            torch.nn.Linear(1, 1),
            "the policy is an nn.Module of type Linear, expected a class or function that makes an hf.Rec",
        ),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(tmp_path: Path, policy: Any, said: str):
    with pytest.raises((TypeError, ValueError)) as error:
        hf.Trainer(config(tmp_path), env=CountingEnv, policy=policy)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_settings_that_are_no_config_are_refused():
    with pytest.raises(TypeError, match=r"Trainer takes a config, got a dict; write hf.PPOConfig"):
        hf.Trainer({"env": "CartPole-v1"})


class TwoSlopes(SumPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(2))


def test_weights_of_another_class_are_refused_with_the_class_of_the_run(tmp_path: Path):
    hf.Trainer(config(tmp_path), CountingEnv, SumPolicy).run()
    words = r"its weights do not fit the policy TwoSlopes; the run was trained with counting_env:SumPolicy \(.*size mismatch"
    with pytest.raises(ValueError, match=words) as refused:
        hf.load(tmp_path / "run", TwoSlopes)
    assert "\n" not in str(refused.value) and isinstance(refused.value.__cause__, RuntimeError)
    with pytest.raises(
        ValueError, match="do not fit the policy ActorCritic; the run was trained with counting_env:Sum"
    ):
        spaces = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
        hf.load(tmp_path / "run", hf.ActorCritic(*spaces))
