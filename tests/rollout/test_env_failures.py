"""Environments that raise, hang or die: the run goes on, nothing leaks over the failure, somebody is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import holdfast as hf
from counting_env import CountingEnv
from failing_env import EPISODE, FailingEnv
from holdfast.rollout.env_failures import EnvFailedError, RebuildingEnv
from holdfast.rollout.vector_env import VectorEnvAdapter
from holdfast.runs import checkpoint
from holdfast.runs.log import read_progress

SMALL = dict(
    env="failing_env:Failing-v0", hidden_size=8, num_envs=3, num_steps=8, minibatches=1, epochs=1,
    total_steps=3 * 8 * 5, checkpoint_every=1, final_eval_episodes=2, tensorboard=False, device="cpu", threads=1,
    replay_check_every=1,
)  # fmt: skip


def config(folder: Path, how: str, **settings: Any) -> hf.TrainConfig:
    (folder / "failures").mkdir(exist_ok=True)
    env_kwargs = {"folder": str(folder / "failures"), "how": how, **settings.pop("env_kwargs", {})}
    return hf.TrainConfig(**{**SMALL, "run_dir": str(folder / "run"), "env_kwargs": env_kwargs, **settings})


class Keep(hf.Callback):
    """Keeps every segment."""

    def __init__(self) -> None:
        self.segments: list[hf.Segment] = []

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        self.segments.append(segment)


@pytest.mark.parametrize(
    ("how", "settings", "reason"),
    [
        ("raise", {}, "ValueError: the simulator fell over"),
        ("raise", {"vectorization": "async"}, "ValueError: the simulator fell over"),
        ("leave", {}, "SystemExit: 3"),
        ("leave", {"vectorization": "async"}, "ended by itself (exit code 3)"),
        ("hang", {"vectorization": "async", "env_timeout": 4.0}, "did not answer within 4 seconds"),
        ("die", {"vectorization": "async"}, "was killed by SIGKILL (exit code -9)"),
    ],
)
def test_a_run_outlives_an_environment(
    tmp_path: Path, capsys: Any, recwarn: Any, how: str, settings: dict[str, Any], reason: str
):
    keep = Keep()
    result = hf.Trainer(config(tmp_path, how, **settings), callbacks=[keep]).run()
    assert (result.stopped_by, result.updates, result.steps) == ("finished", 5, 3 * 8 * 5)
    assert [float(row["env/failures"]) for row in read_progress(tmp_path / "run")] == [1.0] * 5
    report = (tmp_path / "run" / "env_failures-rank0.txt").read_text()
    assert reason in report and ("failing_env.py" in report or how != "raise"), "the environment's own traceback"
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err and not recwarn.list, "gymnasium does not write over the display"
    said = [line for line in shown.out.splitlines() if "an environment failed" in line]
    assert len(said) == 1 and "failure 1 of at most 10" in said[0] and reason in said[0]

    first = keep.segments[0]
    failed = 2  # the third step of the first episode
    assert first.truncated.nonzero().unique(dim=0).tolist() == [[failed, b] for b in range(3)]
    assert first.resets[failed + 1].all() and not first.rewards[failed].any()
    assert (first.obs[failed + 1] == 0).all(), "fresh episodes"
    assert first.resets.sum() == 3 * 2 and not first.terminated.any()
    lengths = [n for segment in keep.segments for n in segment.episode_lengths]
    whole = 3 * ((5 * 8 - failed - 1) // EPISODE)
    assert set(lengths) == {EPISODE} and len(lengths) == whole, "an episode cut off is in no statistics"
    gaps = [float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")]
    assert max(gaps) < 1e-5, "memory was fresh where the episodes began anew, in both legs"


def test_environments_that_raise_at_random_are_built_anew_each_time(tmp_path: Path):
    settings = config(tmp_path, "raise", env_kwargs={"chance": 0.05, "times": 3}, vectorization="async", quiet=True)
    result = hf.Trainer(settings).run()
    rows = read_progress(tmp_path / "run")
    assert result.updates == 5 and len(rows) == 5
    happened = len(list((tmp_path / "failures").iterdir()))
    assert happened >= 1
    assert (tmp_path / "run" / "env_failures-rank0.txt").read_text().count("--- failure") == happened


def test_stop_means_stop_and_the_run_can_be_resumed(tmp_path: Path):
    settings = config(tmp_path, "raise", env_failure="stop", env_kwargs={"at": 6}, quiet=True, checkpoint_every=0)
    settings.num_steps = 4  # the first update is over before the sixth step
    with pytest.raises(EnvFailedError) as stopped:
        hf.Trainer(settings).run()
    run = tmp_path / "run"
    assert str(stopped.value) == (
        f"the environments failed: ValueError: the simulator fell over. Tracebacks are in {run}/env_failures-rank0.txt. "
        f"The last checkpoint is {run}/checkpoints/update_00000001.pt; continue with holdfast train --resume {run}; "
        "--env-failure rebuild rebuilds them"
    )
    assert "in step" in (run / "env_failures-rank0.txt").read_text()
    resumed = hf.Trainer.resume(run)
    assert resumed.update == 1, "though no checkpoint was due yet"
    assert resumed.run().stopped_by == "finished" and len(read_progress(run)) == settings.num_updates


def test_too_many_failures_stop_the_run(tmp_path: Path):
    settings = config(tmp_path, "raise", max_env_failures=2, env_kwargs={"times": 99, "at": 1}, quiet=True)
    with pytest.raises(EnvFailedError, match=r"failed 3 times, 2 allowed.*nothing is saved.*--max-env-failures"):
        hf.Trainer(settings).run()
    assert len(list((tmp_path / "failures").iterdir())) == 3
    tracebacks = (tmp_path / "run" / "env_failures-rank0.txt").read_text()
    assert tracebacks.count("--- failure") == tracebacks.count("the simulator fell over\n") == 3, "the last one too"


def test_a_rebuild_that_fails_is_tried_again():
    attempts: list[int] = []

    def make() -> Any:
        attempts.append(1)
        if len(attempts) in (2, 3):
            raise OSError("no simulator answers")
        return SyncVectorEnv([lambda: FailingEnv("/nowhere", times=0)], autoreset_mode=AutoresetMode.SAME_STEP)

    reports: list[str] = []
    env = RebuildingEnv(make, limit=5, report=lambda number, text: reports.append(text))
    env.reset(seed=1)
    env.env.envs[0].unwrapped.step = lambda action: 1 / 0
    _, rewards, terminated, truncated, info = env.step(np.array([0]))
    assert (rewards, terminated, truncated) == (0, False, True) and info["final_obs"] == [[0]]
    assert env.failures == 3 and len(attempts) == 4
    assert "ZeroDivisionError" in reports[0] and "no simulator answers" in reports[1]
    assert env.step(np.array([1]))[1] == 1


def test_action_masks_are_those_of_the_environments_built_anew():
    env = RebuildingEnv(
        lambda: SyncVectorEnv(
            [lambda: CountingEnv(masks="method", lengths=(9,))], autoreset_mode=AutoresetMode.SAME_STEP
        )
    )
    feed = VectorEnvAdapter(env)
    feed.start()
    feed.step(torch.tensor([0]))
    assert feed.action_mask.tolist() == [[False, True]]
    env.env.envs[0].step = lambda action: 1 / 0
    assert feed.step(torch.tensor([1])).failed
    assert feed.action_mask.tolist() == [[True, False]] and feed.resets.all()
    assert not feed.step(torch.tensor([0])).failed
    assert feed.action_mask.tolist() == [[False, True]]


INTERRUPTED = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
import holdfast as hf
settings = dict(env="CartPole-v1", vectorization="async", num_envs=2, num_steps=8, minibatches=1, total_steps=10**9,
                hidden_size=8, final_eval_episodes=2, tensorboard=False, quiet=True, device="cpu", run_dir=sys.argv[1])
trainer = hf.Trainer(hf.TrainConfig(**settings))
step = trainer.env.step
def interrupted(actions):
    if trainer.update == 2 and trainer.stop_signal.reason is None:
        os.killpg(0, signal.SIGINT)  # as a terminal does: to this process and its environments' alike
        time.sleep(0.5)
    return step(actions)
trainer.env.step = interrupted
result = trainer.run()
assert (result.updates, result.stopped_by, trainer.env_failures.count) == (3, "interrupt", 0), result
"""


def test_ctrl_c_stops_a_run_whose_environments_are_processes_as_it_stops_any(tmp_path: Path):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert checkpoint.find(tmp_path / "run").name == "update_00000003.pt"


def test_an_environment_that_resets_in_the_next_step_is_refused():
    with pytest.raises(ValueError, match="needs SAME_STEP autoreset, SyncVectorEnv declares NEXT_STEP"):
        RebuildingEnv(lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"))


def test_a_timeout_needs_processes_of_their_own():
    with pytest.raises(ValueError, match="--env-timeout 5 needs --vectorization async"):
        hf.TrainConfig(env_timeout=5)
