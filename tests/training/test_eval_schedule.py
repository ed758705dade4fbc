"""Evaluations that a run plays by default: when, at which cost, and without a trace in what it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode

import holdfast as hf
from counting_env import CountingEnv, vector_env
from holdfast import envs
from holdfast.engines.native import NativeActing
from holdfast.runs.log import read_progress
from holdfast.training.eval_schedule import SHARE, EvalSchedule
from holdfast.training.iteration import RunProgress

SETTINGS: dict[str, Any] = dict(
    env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=8, num_envs=8, num_steps=64, minibatches=1, epochs=1,
    total_steps=8 * 64 * 20, checkpoint_every=7, final_eval_episodes=8, tensorboard=False, quiet=True, device="cpu", threads=1,
)  # fmt: skip


def config(folder: Path, **settings: Any) -> hf.PPOConfig:
    return hf.PPOConfig(**{**SETTINGS, "run_dir": str(folder), **settings})


def record(run: Path, *left_out: str) -> list[dict[str, str]]:
    rows = read_progress(run)
    return [{name: text for name, text in row.items() if not name.startswith(("time/", *left_out))} for row in rows]


def evaluated(run: Path) -> list[int]:
    return [int(row["update"]) for row in read_progress(run) if row["eval/mean_return"] != "nan"]


def played(lengths: Any, updates: int = 100, num_envs: int = 8, num_steps: int = 128) -> tuple[list[int], int]:
    """The updates after which a run with episodes of `lengths(update)` steps evaluates, and the steps that this takes."""
    progress = RunProgress(num_updates=updates)
    schedule, found = EvalSchedule(progress, num_envs, num_steps), []
    for progress.update in range(1, updates + 1):
        progress.recent_lengths.clear()
        progress.recent_lengths.extend(lengths(progress.update))
        if schedule.is_due():
            found.append(progress.update)
            progress.last_eval, progress.eval_steps = (
                progress.update,
                progress.eval_steps + max(progress.recent_lengths),
            )
    return found, progress.eval_steps * schedule.episodes


@pytest.mark.parametrize(
    ("length", "expected"),
    [(200, [34, 67, 100]), (640, [100]), (641, []), (1, [*range(5, 101, 5)])],
)
def test_evaluations_are_spread_evenly_up_to_the_end_as_far_as_their_share_pays(length: int, expected: list[int]):
    found, steps = played(lambda update: [length])
    assert found == expected and steps <= SHARE * 100 * 8 * 128


@pytest.mark.parametrize("num_envs", [1, 3, 8, 64])
def test_episodes_that_grow_stay_within_the_share_and_leave_room_for_the_last(num_envs: int):
    found, steps = played(lambda update: [5, 5 + update], 1000, num_envs)
    assert found[-1] == 1000 and len(found) > 3 and steps <= SHARE * 1000 * num_envs * 128


def test_nothing_is_played_before_an_episode_has_ended_and_only_rows_that_a_long_record_keeps_are_used():
    assert played(lambda update: []) == ([], 0)
    found, _ = played(lambda update: [10], 50_001)
    assert all(update % 4 == 0 for update in found) and found[-1] == 50_000


def test_default_evaluations_change_nothing_but_their_columns_and_a_resumed_run_plays_the_same(tmp_path: Path):
    class Stop(hf.Callback):
        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
            return trainer.update < 12

    whole = hf.Trainer(config(tmp_path / "whole"))
    result = whole.run()
    hf.Trainer(config(tmp_path / "without", eval_every=0)).run()
    hf.Trainer(config(tmp_path / "run"), callbacks=[Stop()]).run()
    again = hf.Trainer.resume(tmp_path / "run" / "checkpoints" / "update_00000007.pt")
    again.run()
    assert record(tmp_path / "without", "eval/") == record(tmp_path / "whole", "eval/")
    assert record(tmp_path / "run") == record(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(again.policy.parameters(), whole.policy.parameters()))
    assert len(evaluated(tmp_path / "whole")) > 2 and evaluated(tmp_path / "whole")[-1] == 20
    assert evaluated(tmp_path / "without") == []
    assert 4 * whole.progress.eval_steps <= SHARE * result.steps
    assert not (tmp_path / "whole" / "checkpoints" / "best.pt").exists(), "few episodes do not decide what is best"


def test_short_runs_and_environments_that_cannot_be_made_again_go_without(tmp_path: Path, capsys: Any):
    hf.Trainer(config(tmp_path / "short", total_steps=512, quiet=False)).run()
    assert "evaluation: sampled actions, after training only (the run is short)" in capsys.readouterr().out
    own = dict(num_envs=2, num_steps=1024, quiet=False, env_kwargs={})
    hf.Trainer(config(tmp_path / "own", **own), env=vector_env(AutoresetMode.SAME_STEP, {}, {})).run()
    assert "after training only (there is no second environment: eval_env)" in capsys.readouterr().out
    made = []

    class Single(CountingEnv):
        def __init__(self) -> None:
            made.append(self)
            if len(made) == 3:
                raise OSError("the port is in use")
            super().__init__()

    hf.Trainer(config(tmp_path / "single", **own), env=Single).run()
    said = capsys.readouterr().out
    assert (
        "no evaluation during training: a second environment could not be made (" in said
        and "the port is in use" in said
    )
    assert evaluated(tmp_path / "short") == evaluated(tmp_path / "own") == evaluated(tmp_path / "single") == []


def test_a_policy_in_c_plays_the_episodes_that_it_plays_in_python():
    env = envs.make("CartPole-v1", 3)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core="gru", hidden_size=8)
    in_python, in_c = (hf.evaluate(policy, env, 6, seed=4, acting=kind) for kind in (None, NativeActing))
    assert in_python.lengths == in_c.lengths and in_python.returns == in_c.returns


def test_a_run_says_how_the_actions_of_its_returns_are_drawn(tmp_path: Path, capsys: Any):
    box = dict(env="Pendulum-v1", env_kwargs={}, total_steps=512)
    result = hf.Trainer(config(tmp_path / "box", **box)).run()
    assert result.actions == "white noise"
    said = json.loads((tmp_path / "box" / "meta.json").read_text())["actions"]
    assert said == {"training": "correlated noise", "evaluation": "white noise"}
    hf.Trainer(config(tmp_path / "white", **box, noise_correlation=0.0, quiet=False, eval_every=1)).run()
    first_lines = capsys.readouterr().out
    assert "returns training episodes: sampled actions; evaluation: sampled actions, every 1 updates" in first_lines
    sac = hf.SACConfig(env="Pendulum-v1", run_dir=str(tmp_path / "sac"), device="cpu", quiet=True, total_steps=100)
    assert hf.Trainer(sac).algorithm.evaluates_with() == "most likely actions"


def test_an_evaluation_of_a_trainer_records_its_steps(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path / "run", total_steps=512))
    found = trainer.evaluate(4, record=("state", "value")).record
    assert found is not None and found["value"].shape == found["resets"].shape and found["state.h"].shape[1] == 4
