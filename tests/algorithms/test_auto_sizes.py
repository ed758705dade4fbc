"""Settings that follow from the task: the numbers for some tasks, and that what the user gave is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.algorithms.auto_sizes import choose_for_actions, choose_sizes
from holdfast.algorithms.base import Task
from holdfast.display.first_lines import first_lines
from holdfast.envs import make

SLOW, FAST, GPU = Task(False, False), Task(False, True), Task(True, True)


@pytest.mark.parametrize(
    "steps, task, sizes",
    [
        (100_000, SLOW, (8, 128, 10, 8)),
        (300_000, SLOW, (16, 128, 10, 8)),
        (1_000_000, SLOW, (64, 128, 10, 8)),
        (1_000_000, FAST, (64, 128, 4, 32)),
        (15_000_000, GPU, (512, 128, 4, 32)),
        (100_000_000, GPU, (2048, 128, 4, 8)),
        (100, SLOW, (8, 128, 10, 8)),
    ],
)
def test_sizes_by_hand(steps: int, task: Task, sizes: tuple[int, ...]):
    config, text = choose_sizes(hf.TrainConfig(total_steps=steps), task)
    assert (config.num_envs, config.num_steps, config.epochs, config.minibatches) == sizes
    assert text.startswith(f"chosen for {steps:,} steps")


@given(
    st.integers(1, 10**9), st.booleans(), st.booleans(), st.integers(0, 5000), st.sampled_from([0, 1, 7, 64, 300]),
    st.sampled_from([0, 1, 3]), st.sampled_from([None, 1, 5, 32]), st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_any_combination_gives_a_valid_config_and_keeps_what_was_given(
    steps, gpu, fast, envs, length, epochs, bptt, ranks
):
    if bptt is not None and length % bptt:
        length = bptt * max(1, length // bptt)
    if 0 < envs < ranks:
        envs = ranks
    given_ = hf.TrainConfig(total_steps=steps, num_envs=envs, num_steps=length, epochs=epochs, bptt=bptt)
    config, _ = choose_sizes(given_, Task(gpu, fast, None, ranks))
    config.require_envs_for(ranks)
    assert config.num_envs == envs or envs == 0
    assert config.num_steps == length or length == 0
    assert config.epochs == epochs or epochs == 0
    assert config.num_updates >= 1


def test_the_run_records_what_was_chosen_and_takes_the_number_of_copies_from_your_environment(tmp_path: Path):
    env = make("holdfast/RepeatPreviousEasy-v0", 6)
    config = hf.TrainConfig(total_steps=100, hidden_size=8, run_dir=str(tmp_path / "run"), quiet=True)
    trainer = hf.Trainer(config, env=env)
    assert (trainer.config.num_envs, trainer.config.minibatches, trainer.config.inputs) == (6, 6, ("obs",))
    assert trainer.parts.chosen.startswith("chosen for 100 steps") and config.num_envs == 0


@pytest.mark.parametrize(
    "space, chosen",
    [
        (Discrete(3), (0.01, 1.0, 0.9)),
        (None, (0.01, 1.0, 0.9)),
        (Box(-1, 1, (1,)), (0.01, 1.0, 0.9)),
        (Box(-1, 1, (2,)), (0.0, 0.6, 0.0)),
        (Box(-1, 1, (2, 3)), (0.0, 0.6, 0.0)),
    ],
)
def test_exploration_follows_from_the_actions_and_what_was_given_is_kept(space: Any, chosen: tuple[float, ...]):
    names = ("entropy_coef", "initial_std", "noise_correlation")
    config, text = choose_for_actions(hf.TrainConfig(), space)
    assert tuple(getattr(config, name) for name in names) == chosen
    assert bool(text) == (chosen[0] == 0) and config.automatic_name == hf.TrainConfig().automatic_name
    given_ = hf.TrainConfig(entropy_coef=0.02, initial_std=2.0, noise_correlation=0.5)
    assert choose_for_actions(given_, space) == (given_, "")
    assert "ent0.02" in given_.automatic_name
    other = hf.PQNConfig()
    assert choose_for_actions(other, space) == (other, "")


class TwoActions(gym.Wrapper):  # type: ignore[type-arg]
    """Pendulum with an action that does nothing."""

    def __init__(self) -> None:
        super().__init__(gym.make("Pendulum-v1"))
        self.action_space = Box(-1, 1, (2,))

    def step(self, action: Any) -> Any:
        return self.env.step(action[:1])


def test_a_run_records_and_says_what_it_chose_for_its_actions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = dict(hidden_size=8, num_envs=1, num_steps=8, total_steps=8, final_eval_episodes=1)
    config = hf.TrainConfig(run_dir=str(tmp_path / "run"), device="cpu", tensorboard=False, **sizes)
    trainer = hf.Trainer(config, env=TwoActions)
    trainer.run()
    recorded = hf.TrainConfig.load(tmp_path / "run" / "config.json", allow_imports=True)
    assert (recorded.entropy_coef, recorded.initial_std, recorded.noise_correlation) == (0.0, 0.6, 0.0)
    assert trainer.collector.noise is None
    said = "actions entropy_coef 0, initial_std 0.6, noise_correlation 0 (chosen for several Box actions)"
    assert said in capsys.readouterr().out


WITH_ACTION = ("obs", "prev_action")


@pytest.mark.parametrize(
    "task, inputs",
    [
        ("MultiarmedBandit", WITH_ACTION),
        ("RepeatFirst", WITH_ACTION),
        ("NoisyPositionOnlyCartPole", WITH_ACTION),
        ("HigherLower", ("obs",)),
    ],
)
def test_a_policy_sees_its_last_action_where_the_environment_names_it(
    task: str, inputs: tuple[str, ...], tmp_path: Path
):
    config = hf.TrainConfig(env=f"holdfast/{task}Easy-v0", hidden_size=8, run_dir=str(tmp_path / "run"), quiet=True)
    assert hf.Trainer(config).config.inputs == inputs
    given_ = hf.TrainConfig(
        env=f"holdfast/{task}Easy-v0", inputs=("obs",), hidden_size=8, run_dir=str(tmp_path / "two")
    )
    assert hf.Trainer(given_).config.inputs == ("obs",)


def test_without_memory_or_with_a_policy_of_your_own_the_observation_is_all_that_is_seen(tmp_path: Path):
    def trained_on(name: str, policy: hf.ActorCritic | None = None, **settings: Any) -> tuple[str, ...]:
        folder = str(tmp_path / name)
        config = hf.TrainConfig(
            env="holdfast/RepeatFirstEasy-v0", hidden_size=8, run_dir=folder, quiet=True, **settings
        )
        return hf.Trainer(config, policy=policy).config.inputs

    own = hf.ActorCritic(Discrete(4), Discrete(4), core="gru", hidden_size=8)
    assert trained_on("control", core="none") == ("obs",)
    assert trained_on("own", policy=own) == ("obs",)
    assert trained_on("asked", core="none", inputs=WITH_ACTION) == WITH_ACTION


@pytest.mark.parametrize(
    "inputs, said",
    [
        (("obs",), "memory  gru, 8 units"),
        (WITH_ACTION, "memory  gru, 8 units; sees its previous action"),
        ((*WITH_ACTION, "prev_reward"), "memory  gru, 8 units; sees its previous action and its previous reward"),
    ],
)
def test_the_first_lines_of_a_run_say_what_the_policy_sees_besides_the_observation(inputs: tuple[str, ...], said: str):
    assert first_lines(hf.TrainConfig(core="gru", hidden_size=8, inputs=inputs, run_dir="r"), {})[1] == said


def test_the_first_lines_of_a_run_say_one_environment():
    lines = first_lines(hf.TrainConfig(num_envs=1, num_steps=8, epochs=2, minibatches=1, run_dir="r"), {})
    assert any("1 environment x 8 steps" in line for line in lines)
