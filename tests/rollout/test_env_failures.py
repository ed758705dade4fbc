"""Environments that raise, hang or die: the run goes on, nothing leaks over the failure, somebody is told."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import holdfast as hf
from counting_env import CountingEnv
from failing_env import EPISODE, FailingEnv, SavingVectorEnv
from holdfast.distributed.processes import Terminated
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
        ("raise", {"vectorization": "workers"}, "ValueError: the simulator fell over"),
        ("leave", {"vectorization": "workers"}, "ended by itself (exit code 3)"),
        ("hang", {"vectorization": "workers", "env_timeout": 4.0}, "did not answer within 4 seconds"),
        ("die", {"vectorization": "workers"}, "was killed by SIGKILL (exit code -9)"),
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
    warned = [
        w for w in recwarn.list if "fork" not in str(w.message)
    ]  # Python 3.12 warns of forks with threads, JAX too
    assert "Traceback" not in shown.out + shown.err and not warned, "gymnasium does not write over the display"
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
    assert max(gaps) < 1e-5, "memory was fresh where the episodes started over, in both legs"


def test_environments_that_raise_at_random_are_rebuilt_each_time(tmp_path: Path):
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
        f"The last checkpoint is {run}/checkpoints/update_00000001.pt; continue with holdfast train --resume {run} "
        "--allow-imports; --env-failure rebuild rebuilds them"
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


def test_action_masks_are_those_of_the_rebuilt_environments():
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


def rows_but_time(run: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_progress(run)]


@pytest.mark.parametrize("at", [8 * 2 + 1, 8 * 2 + 5])  # in the first step after the resume, and 5 steps after it
@pytest.mark.parametrize("seed", [1, 4])
def test_a_failure_after_a_resume_goes_as_it_would_have_gone_without_the_resume(tmp_path: Path, at: int, seed: int):
    def settings(name: str, **more: Any) -> hf.TrainConfig:
        (tmp_path / name).mkdir()
        run = {"env": "failing_env:Saving-v0", "run_dir": str(tmp_path / name / "run"), "seed": seed, "quiet": True}
        env_kwargs = {"folder": str(tmp_path / name), "at": at}
        return hf.TrainConfig(**{**SMALL, **run, "env_kwargs": env_kwargs, "lr_schedule": "constant", **more})

    hf.Trainer(settings("whole")).run()
    hf.Trainer(settings("parts", total_steps=3 * 8 * 2)).run()
    assert not (tmp_path / "parts" / "failed").exists()
    trainer = hf.Trainer.resume(tmp_path / "parts" / "run", total_steps=3 * 8 * 5)
    trainer.run()
    assert (tmp_path / "parts" / "failed").exists() and not trainer.episodes_restarted
    whole, parts = rows_but_time(tmp_path / "whole" / "run"), rows_but_time(tmp_path / "parts" / "run")
    assert [float(row["env/failures"]) for row in whole] == [0, 0, 1, 1, 1]
    assert whole == parts


def test_rebuilt_environments_are_saved_with_the_seeds_of_their_rebuilds(tmp_path: Path):
    """A second failure, after a resume, must not repeat the episodes that followed the first."""

    def make() -> Any:
        return SavingVectorEnv(2, str(tmp_path / "nowhere"))

    first, second = RebuildingEnv(make), RebuildingEnv(make)
    first.reset(seed=3)
    action = np.array([1, 1])
    for env in (first, second):
        env.env.unwrapped._fail_once = lambda: 1 / 0
    first.env.at = 1
    after_one_failure, *_ = first.step(action)
    second.load_state_dict(first.state_dict())
    for env in (first, second):
        env.env.at, env.env._fail_once = 1, lambda: 1 / 0
    (a, *_, info), (b, *_, other) = first.step(action), second.step(action)
    assert np.array_equal(a, b) and not np.array_equal(a, after_one_failure)
    assert np.array_equal(info["final_obs"], after_one_failure) and np.array_equal(
        other["final_obs"], after_one_failure
    )
    assert second.failures == 2


def test_an_environment_that_cannot_save_its_state_is_wrapped_in_one_that_cannot(tmp_path: Path):
    env = RebuildingEnv(lambda: SyncVectorEnv([CountingEnv], autoreset_mode=AutoresetMode.SAME_STEP))
    assert not hasattr(env, "state_dict") and not hasattr(env, "load_state_dict") and not hasattr(env, "regroup")


def test_another_number_of_ranks_shares_out_the_last_observations_too(tmp_path: Path):
    class Regrouping(SavingVectorEnv):
        def regroup(self, saved: Any, first: int, part: int, seed: int) -> dict[str, Any]:
            return dict(saved[min(part, len(saved) - 1)])

    parts = []
    for seed in (1, 2):
        adapter = VectorEnvAdapter(RebuildingEnv(lambda: Regrouping(2, str(tmp_path))))
        adapter.start(seed)
        parts.append(adapter.state_dict())
    three = RebuildingEnv(lambda: Regrouping(3, str(tmp_path)))
    state = three.regroup([part["env"] for part in parts], 1, 0, seed=9)
    assert torch.equal(state["obs"]["numpy array"], torch.cat([part["obs"] for part in parts])[1:4])
    assert state["seed"] == 1 and three.regroup([part["env"] for part in parts], 1, 2, seed=9)["seed"] == 9


def test_a_state_that_an_older_version_saved_without_the_wrapper_is_restored(tmp_path: Path):
    env = RebuildingEnv(lambda: SavingVectorEnv(2, str(tmp_path)))
    plain = SavingVectorEnv(2, str(tmp_path))
    plain.reset(seed=1)
    env.reset(seed=2)
    env.load_state_dict(plain.state_dict())
    assert np.array_equal(env.step(np.array([0, 1]))[0], plain.step(np.array([0, 1]))[0])


def test_masks_that_fail_are_a_failure_of_the_environment(tmp_path: Path):
    run = {"env": "failing_env:Saving-v0", "run_dir": str(tmp_path / "run"), "quiet": True}
    hf.Trainer(hf.TrainConfig(**{**SMALL, **run, "env_kwargs": {"folder": str(tmp_path), "mask_at": 11}})).run()
    assert [float(row["env/failures"]) for row in read_progress(tmp_path / "run")] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_masks_of_other_processes_that_fail_or_hang_are_a_failure_too(how: str):
    class Masked(CountingEnv):
        def __init__(self) -> None:
            super().__init__(lengths=(9,), masks="method")
            self.action_masks = self.failing_masks

        def failing_masks(self) -> Any:
            if self.t == 2:
                time.sleep(1000) if how == "hang" else 1 / 0
            return self._mask()

    def make() -> Any:
        return AsyncVectorEnv([Masked] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    env = RebuildingEnv(make, timeout=2.0)
    feed = VectorEnvAdapter(env)
    feed.start()
    assert not feed.step(torch.tensor([0, 0])).failed and feed.action_mask.tolist() == [[False, True]] * 2
    assert feed.step(torch.tensor([1, 1])).failed and feed.action_mask.tolist() == [[True, False]] * 2
    assert feed.resets.all() and env.failures == 1
    env.close()


INTERRUPTED = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
import holdfast as hf
settings = dict(env="CartPole-v1", vectorization=sys.argv[2], env_failure="stop",
                num_envs=2, num_steps=8, minibatches=1, total_steps=10**9,
                hidden_size=8, final_eval_episodes=2, tensorboard=False, quiet=True, device="cpu", run_dir=sys.argv[1])
trainer = hf.Trainer(hf.TrainConfig(**settings))
step = trainer.env.step
def interrupted(actions):
    if trainer.update == 2 and trainer.stop_signal.reason is None:
        os.killpg(0, int(sys.argv[3]))  # as terminals and schedulers do: to this process and its environments' alike
        time.sleep(0.5)
    return step(actions)
trainer.env.step = interrupted
try:
    assert trainer.run().stopped_by == "interrupt"
finally:
    assert (trainer.update, trainer.env_failures.count) == (3, 0), trainer.update
"""


@pytest.mark.parametrize(
    ("vectorization", "number", "code"), [("async", signal.SIGINT, 0), ("workers", signal.SIGTERM, 143)]
)
def test_a_signal_stops_a_run_whose_environments_are_processes_as_it_stops_any(
    tmp_path: Path, vectorization: str, number: int, code: int
):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "run"), vectorization, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)
    assert done.returncode == code, done.stderr[-2000:]
    assert checkpoint.find(tmp_path / "run").name == "update_00000003.pt"


def test_environments_that_end_with_the_run_are_not_blamed(tmp_path: Path):
    """gymnasium's processes obey a SIGTERM that goes to all."""

    trainer = hf.Trainer(hf.TrainConfig(**{**SMALL, "env": "CartPole-v1", "run_dir": str(tmp_path / "run")}))
    step = trainer.env.step

    def ends(actions: Any) -> Any:
        if trainer.update < 2:
            return step(actions)
        trainer.stop_signal.reason = "SIGTERM"
        raise EnvFailedError("the environments failed: the process of environment 0 was killed by SIGTERM")

    trainer.env.step = ends
    with pytest.raises(SystemExit) as ended:
        trainer.run()
    assert ended.value.code == 143 and checkpoint.find(tmp_path / "run").name == "update_00000002.pt"


def test_an_environment_that_resets_in_the_next_step_is_refused():
    with pytest.raises(ValueError, match="needs SAME_STEP autoreset, SyncVectorEnv declares NEXT_STEP"):
        RebuildingEnv(lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"))


def test_a_timeout_needs_processes_of_their_own():
    with pytest.raises(ValueError, match="env_timeout=5 needs vectorization async"):
        hf.TrainConfig(env_timeout=5)


def test_a_process_that_is_told_to_end_while_an_environment_works_ends_and_rebuilds_nothing():
    class Told(CountingEnv):
        def step(self, action: Any) -> Any:
            raise Terminated  # what the handler of SIGTERM raises, wherever Python is

    reports: list[str] = []
    env = RebuildingEnv(
        lambda: SyncVectorEnv([Told], autoreset_mode=AutoresetMode.SAME_STEP),
        report=lambda number, text: reports.append(text),
    )
    env.reset(seed=1)
    with pytest.raises(SystemExit) as end:
        env.step(env.action_space.sample())
    assert (end.value.code, reports, env.failures) == (143, [], 0)
