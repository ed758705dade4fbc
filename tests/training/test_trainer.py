"""A run: killed and resumed without a trace, evaluated without a trace, stopped politely, kept in its folder."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
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
from gymnasium.vector import AutoresetMode

import holdfast as hf
from counting_env import vector_env
from holdfast import envs
from holdfast.runs import checkpoint
from holdfast.runs.folder import RunFolder
from holdfast.runs.log import read_progress
from holdfast.training.evaluation import EvalResult

SMALL = dict(
    env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=8, num_envs=4, num_steps=8, minibatches=2, epochs=2,
    total_steps=4 * 8 * 10, checkpoint_every=3, final_eval_episodes=2, learning_rate=0.01, tensorboard=False,
    quiet=True, device="cpu", threads=1,
)  # fmt: skip
CARTPOLE = dict(env="CartPole-v1", env_kwargs={}, mask_velocity=True)  # gymnasium's: it cannot restore its state


def config(folder: Path, **settings: Any) -> hf.TrainConfig:
    return hf.TrainConfig(**{**SMALL, "run_dir": str(folder), **settings})


def record(run: Path, *left_out: str) -> bytes:
    """progress.csv without the columns `time/*` (and others that begin so)."""
    with open(run / "progress.csv", newline="") as file:
        rows = list(csv.reader(file))
    kept = [i for i, name in enumerate(rows[0]) if not name.startswith(("time/", *left_out))]
    return "\n".join(",".join(row[i] for i in kept) for row in rows).encode()


class Stop(hf.Callback):
    """Stops a run after so many updates."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
        return trainer.update < self.after


class Keep(hf.Callback):
    """Keeps every segment."""

    def __init__(self) -> None:
        self.segments: list[hf.Segment] = []

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        self.segments.append(segment)


# --- killed ---------------------------------------------------------------------------------------------------------

CHILD = """
import json, os, signal, sys, threading
import torch
torch.set_num_threads(1)
import holdfast as hf
settings, torn, update, seconds = json.loads(sys.argv[1])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
class DieSoon(hf.Callback):
    def on_update_end(self, trainer, row):
        if trainer.update == update:
            threading.Timer(seconds, die).start()
replace = os.replace
def replace_or_die(source, target):
    if torn and str(target).endswith(torn):  # half of the file is on the disk, under its temporary name
        os.truncate(source, os.path.getsize(source) // 2)
        die()
    replace(source, target)
os.replace = replace_or_die
hf.Trainer(hf.TrainConfig(**settings), callbacks=[DieSoon()]).run()
"""

KILLS = {
    "in a plain run": (dict(), ""),
    "with normalisers, chunks and evaluation": (
        dict(
            env="holdfast/PositionOnlyCartPoleEasy-v0", env_kwargs={"max_episode_length": 20}, core="gru", bptt=4,
            normalize_obs=True, normalize_reward=True, refresh_states=True, eval_every=20, eval_episodes=2, epochs=2,
        ),
        "",
    ),
    "while a checkpoint is written": (dict(critic_core="separate", num_layers=2), "update_00000021.pt"),
}  # fmt: skip


def run_child(settings: dict[str, Any], torn: str = "", update: int = -1, seconds: float = 0.0) -> Any:
    """A run in a process of its own, which is killed `seconds` after `update`, or while it writes the file `torn`."""
    arguments = json.dumps([settings, torn, update, seconds])
    return subprocess.Popen([sys.executable, "-c", CHILD, arguments], stderr=subprocess.PIPE)


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_and_resumed_run_writes_the_same_record_as_one_never_stopped(tmp_path: Path, name: str):
    special, torn = KILLS[name]
    settings = {**SMALL, **special, "total_steps": 4 * 8 * 60, "checkpoint_every": 7}
    update, seconds = random.randrange(8, 40), random.random() * 0.02  # another moment each time
    child = run_child({**settings, "run_dir": str(tmp_path / "killed")}, torn, -1 if torn else update, seconds)
    assert child.wait(120) == -signal.SIGKILL, child.stderr.read()
    reached = len(read_progress(tmp_path / "killed"))
    assert 7 <= reached < 60
    if torn:
        assert reached == 21 and checkpoint.find(tmp_path / "killed").name == "update_00000014.pt"

    resumed = hf.Trainer.resume(tmp_path / "killed")
    assert resumed.update % 7 == 0 and reached - 7 <= resumed.update <= reached
    resumed.run()
    whole = hf.Trainer(hf.TrainConfig(**{**settings, "run_dir": str(tmp_path / "whole")}))
    whole.run()
    assert record(tmp_path / "killed") == record(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(resumed.policy.parameters(), whole.policy.parameters()))


# --- resumed --------------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_the_same_from_any_of_its_checkpoints(tmp_path: Path):
    hf.Trainer(config(tmp_path / "whole")).run()
    hf.Trainer(config(tmp_path / "run"), callbacks=[Stop(8)]).run()
    names = [p.name for p in checkpoint.rolling(tmp_path / "run")]
    assert names == ["update_00000003.pt", "update_00000006.pt", "update_00000008.pt"]
    trainer = hf.Trainer.resume(tmp_path / "run" / "checkpoints" / names[0])
    assert (trainer.update, trainer.steps) == (3, 3 * 32)
    trainer.callbacks = [Stop(4)]
    trainer.run()
    assert len(read_progress(tmp_path / "run")) == 4, "the record is cut back to the checkpoint"
    left = [p.name for p in checkpoint.rolling(tmp_path / "run")]
    assert left == ["update_00000003.pt", "update_00000004.pt"], "later checkpoints belong to what is done again"
    hf.Trainer.resume(tmp_path / "run").run()
    assert record(tmp_path / "run") == record(tmp_path / "whole")


def test_a_run_saved_before_its_first_step_is_the_same_run(tmp_path: Path):
    hf.Trainer(config(tmp_path / "whole")).run()
    fresh = hf.Trainer(config(tmp_path / "run"))
    fresh.save(tmp_path / "first.pt")
    assert hf.Trainer.resume(tmp_path / "first.pt").run().run_dir == tmp_path / "first", "next to the file"
    assert record(tmp_path / "first") == record(tmp_path / "whole") and not (tmp_path / "run").exists()


def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path: Path):
    hf.Trainer(config(tmp_path / "old"), callbacks=[Stop(4)]).run()
    shutil.move(tmp_path / "old", tmp_path / "new")
    result = hf.Trainer.resume(tmp_path / "new").run()
    assert result.run_dir == tmp_path / "new" and not (tmp_path / "old").exists()
    assert len(read_progress(tmp_path / "new")) == 10


def test_resuming_restores_threads_and_counts_the_time_before(tmp_path: Path):
    hf.Trainer(config(tmp_path / "run", threads=None), callbacks=[Stop(4)]).run()
    before = float(read_progress(tmp_path / "run")[3]["time/elapsed"])
    try:
        torch.set_num_threads(2)
        hf.Trainer.resume(tmp_path / "run").run()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
    times = [float(row["time/elapsed"]) for row in read_progress(tmp_path / "run")]
    assert times[4] > before and times == sorted(times)


def test_a_checkpoint_within_a_run_counts_the_time_of_that_run(tmp_path: Path):
    hf.Trainer(config(tmp_path / "run"), callbacks=[Stop(6)]).run()
    saved = checkpoint.load(checkpoint.rolling(tmp_path / "run")[0])
    assert saved["seconds"] >= float(read_progress(tmp_path / "run")[2]["time/elapsed"]) > 0


class PaysLater(gym.Env):  # type: ignore[type-arg]
    """Episodes of one step, which pay 1 from the fifth update on."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        PaysLater.steps += 1
        return np.zeros(1, np.float32), float(PaysLater.steps > 4 * 8 * 4), True, False, {}


def test_a_resumed_run_that_learned_before_it_was_stopped_is_not_told_that_nothing_was_learned(
    tmp_path: Path, capsys: Any
):
    settings = config(tmp_path / "run", env_kwargs={}, total_steps=4 * 8 * 20, quiet=False)
    hf.Trainer(settings, env=PaysLater, callbacks=[Stop(12)]).run()
    trainer = hf.Trainer.resume(tmp_path / "run", env=PaysLater, total_steps=4 * 8 * 24)
    assert trainer.progress.first_returns == [0.0] * 100, "those of the beginning, not of the resume"
    trainer.run()
    assert "nothing learned" not in capsys.readouterr().out


def test_settings_may_change_when_a_run_is_resumed(tmp_path: Path):
    hf.Trainer(config(tmp_path / "run")).run()
    assert hf.Trainer.resume(tmp_path / "run", total_steps=4 * 8 * 12).run().updates == 12
    with pytest.raises(ValueError, match="unknown settings"):
        hf.Trainer.resume(tmp_path / "run", total_stesp=1)
    for changed in dict(hidden_size=3), dict(reset="never"), dict(num_envs=16), dict(activation="gelu"), dict(seed=77):
        with pytest.raises(
            ValueError, match=f"^{next(iter(changed))}=.* cannot change when a run is resumed; start a new run"
        ):
            hf.Trainer.resume(tmp_path / "run", **changed)


def test_where_the_environment_cannot_restore_all_episodes_restart_and_one_line_says_so(tmp_path: Path, capsys: Any):
    settings = config(tmp_path / "run", **CARTPOLE, normalize_reward=True, quiet=False)
    hf.Trainer(settings, callbacks=[Stop(4)]).run()
    capsys.readouterr()
    keep = Keep()
    trainer = hf.Trainer.resume(tmp_path / "run", callbacks=[keep, Stop(6)])
    assert not trainer.algorithm.reward_scale.open_return.any(), "open episodes are dropped"
    trainer.run()
    said = [line for line in capsys.readouterr().out.splitlines() if "restarted" in line]
    assert len(said) == 1 and "cannot restore its state, so all episodes were restarted with fresh memory" in said[0]
    first = keep.segments[0]
    assert first.resets[0].all() and not first.start_state["h"].any()
    assert len(read_progress(tmp_path / "run")) == 6
    began_with = hf.Trainer(config(tmp_path / "other", **CARTPOLE)).collector.rollout().obs[0]
    assert not torch.equal(first.obs[0], began_with), "other episodes than those the run began with"


# --- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [{}, CARTPOLE])
def test_training_is_the_same_with_and_without_periodic_evaluation(tmp_path: Path, special: dict[str, Any]):
    settings = {**special, "normalize_obs": True}
    hf.Trainer(config(tmp_path / "without", **settings)).run()
    hf.Trainer(config(tmp_path / "with", **settings, eval_every=2, eval_episodes=3)).run()
    assert record(tmp_path / "without", "eval/") == record(tmp_path / "with", "eval/")
    evaluated = [row["eval/mean_return"] != "nan" for row in read_progress(tmp_path / "with")]
    assert evaluated == [False, True] * 5


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scores = iter([1.0, 3.0, 3.0, 2.0, 2.5, 0.0])
    weights: dict[int, torch.Tensor] = {}

    def scored(self: hf.Trainer, episodes: int, deterministic: bool = False) -> EvalResult:
        weights[self.update] = self.policy.actor.weight.detach().clone()
        return EvalResult.of([next(scores)], [5])

    monkeypatch.setattr(hf.Trainer, "evaluate", scored)
    hf.Trainer(config(tmp_path / "run", eval_every=2)).run()
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    assert checkpoint.load(best)["update"] == 4 and checkpoint.load(best)["best_return"] == 3.0
    assert torch.equal(hf.load(best).actor.weight, weights[4])


def test_the_result_is_measured_on_fresh_episodes_and_can_be_repeated(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path / "run", final_eval_episodes=20))
    result = trainer.run()
    env = envs.make("holdfast/TMaze-v0", 4, env_kwargs={"length": 3})
    again = hf.evaluate(hf.load(result.run_dir), env, 20, seed=1 + 1_000_003 * 11)
    assert result.mean_return == again.mean_return and result.std_error == again.std_error
    assert (result.steps, result.updates, result.stopped_by) == (320, 10, "finished")


# --- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_rollout_end", "on_update_end", "on_eval"])
def test_a_callback_that_returns_false_stops_the_run_after_the_update(tmp_path: Path, hook: str):
    callback = type("Once", (), {hook: lambda self, trainer, what: False})()
    result = hf.Trainer(config(tmp_path / "run", eval_every=2, eval_episodes=1), callbacks=[callback]).run()
    expected = 2 if hook == "on_eval" else 1
    assert (result.updates, result.stopped_by) == (expected, "callback")
    assert len(read_progress(tmp_path / "run")) == expected
    assert checkpoint.find(tmp_path / "run").name == f"update_{expected:08d}.pt"


def test_callbacks_see_every_update_and_none_of_them_has_to_answer(tmp_path: Path):
    seen: list[Any] = []

    class Watch(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            seen.append(segment.resets.shape)

        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
            seen.append(row["update"])

    hf.Trainer(config(tmp_path / "run", total_steps=64), callbacks=[Watch(), hf.Callback()]).run()
    assert seen == [(8, 4), 1, (8, 4), 2]


class Interrupt(hf.Callback):
    """Ctrl-C, `times` times, in the rollout after `after` updates."""

    def __init__(self, after: int, times: int) -> None:
        self.after, self.times = after, times

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        if trainer.update == self.after:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_update_saves_and_returns(tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    result = hf.Trainer(config(tmp_path / "run"), callbacks=[Interrupt(after=4, times=1)]).run()
    assert (result.updates, result.stopped_by) == (5, "interrupt")
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoint.find(tmp_path / "run").name == "update_00000005.pt"
    hf.Trainer.resume(tmp_path / "run").run()
    hf.Trainer(config(tmp_path / "whole")).run()
    assert record(tmp_path / "run") == record(tmp_path / "whole")


class Terminate(hf.Callback):
    """SIGTERM in the rollout after `after` updates, as Slurm, Kubernetes and spot machines send it."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        if trainer.update == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_says_how_to_resume_and_exits_with_143(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "a run"
    with pytest.raises(SystemExit) as end:
        hf.Trainer(config(run), callbacks=[Terminate(after=4)]).run()
    assert end.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    message = f"stopped by SIGTERM after update 5 of 10; continue with   holdfast train --resume '{run}'\n"
    assert capsys.readouterr().err == message
    hf.Trainer.resume(run).run()
    hf.Trainer(config(tmp_path / "whole")).run()
    assert record(run) == record(tmp_path / "whole")


def test_sigterm_in_the_final_evaluation_or_before_it_ends_the_process_and_everything_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def evaluate_and_die(self: hf.Trainer, episodes: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the evaluation went on")

    def save_and_die(self: RunFolder, update: int) -> None:
        save(self, update)
        os.kill(os.getpid(), signal.SIGTERM)

    save = RunFolder.save_at_the_end
    for name, owner, method, deadly in (
        ("evaluation", hf.Trainer, "evaluate", evaluate_and_die),
        ("between", RunFolder, "save_at_the_end", save_and_die),
    ):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr(owner, method, deadly)
            hf.Trainer(config(tmp_path / name)).run()
        assert end.value.code == 143
        assert checkpoint.find(tmp_path / name).name == "update_00000010.pt"
        resumed, whole = hf.Trainer.resume(tmp_path / name).run(), hf.Trainer(config(tmp_path / f"{name} whole")).run()
        assert resumed.mean_return == whole.mean_return


def test_a_handler_of_the_users_own_for_sigterm_stays(tmp_path: Path):
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        result = hf.Trainer(config(tmp_path / "run"), callbacks=[Terminate(after=4)]).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (result.updates, result.stopped_by, received) == (10, "finished", [signal.SIGTERM])


def test_a_second_ctrl_c_stops_at_once_and_leaves_the_run_resumable(tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        hf.Trainer(config(tmp_path / "run"), callbacks=[Interrupt(after=4, times=2)]).run()
    assert signal.getsignal(signal.SIGINT) is before
    assert hf.Trainer.resume(tmp_path / "run").update == 3


def test_ctrl_c_stops_a_run_in_another_process_with_a_clean_exit(tmp_path: Path):
    settings = {**SMALL, "total_steps": 10**9, "run_dir": str(tmp_path / "run"), "checkpoint_every": 10**6}
    child = run_child(settings)
    try:
        deadline = time.monotonic() + 120
        while not read_progress(tmp_path / "run") and child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0, child.stderr.read() if child.stderr else ""
    finally:
        child.kill()
    rows = read_progress(tmp_path / "run")
    assert checkpoint.load(checkpoint.find(tmp_path / "run"))["update"] == len(rows) == int(rows[-1]["update"])


def test_a_requested_checkpoint_is_saved_once_after_the_current_update(tmp_path: Path):
    class Request(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            if trainer.update == 1:  # during update 2
                trainer.request_checkpoint()

        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
            if trainer.update == 5:
                trainer.request_checkpoint()

    trainer = hf.Trainer(config(tmp_path / "run", checkpoint_every=4, keep_checkpoints=9), callbacks=[Request()])
    trainer.run()
    names = [path.name for path in checkpoint.rolling(tmp_path / "run")]
    assert names == [f"update_{update:08d}.pt" for update in (2, 4, 5, 8, 10)]
    assert trainer.config.checkpoint_every == 4


def test_a_run_stops_when_the_last_hundred_episodes_reach_the_target(tmp_path: Path):
    result = hf.Trainer(config(tmp_path / "run", stop_at=-2.0, total_steps=4 * 8 * 500)).run()
    assert result.stopped_by == "target" and result.updates < 500
    rows = read_progress(tmp_path / "run")
    assert sum(int(row["rollout/episodes"]) for row in rows) >= 100
    assert sum(int(row["rollout/episodes"]) for row in rows[:-1]) < 100


# --- one's own ------------------------------------------------------------------------------------------------------


def test_an_environment_and_a_policy_of_ones_own(tmp_path: Path):
    env = vector_env(AutoresetMode.NEXT_STEP, {}, {"ends": ("truncated",), "lengths": (3,)})
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", 8, normalize_obs=True)
    settings = config(tmp_path / "run", num_envs=2, normalize_reward=True, total_steps=2 * 8 * 3)
    keep = Keep()
    trainer = hf.Trainer(settings, env=env, policy=policy, callbacks=[keep])
    result = trainer.run()
    assert trainer.policy is policy and result.mean_return == pytest.approx(2.5)
    real = sum(int(segment.valid.sum()) for segment in keep.segments)
    assert result.steps == real < 48, "dummy steps are not counted"
    count = next(m for m in policy.modules() if hasattr(m, "count")).count.item()
    assert count == pytest.approx(real, abs=1e-3), "nor seen by the normaliser"
    assert trainer.algorithm.reward_scale.count == pytest.approx(real, abs=1e-3), "nor by the scale of rewards"


def test_environments_in_processes_of_their_own_give_the_same_run(tmp_path: Path):
    for how in ("sync", "async", "workers"):
        settings = config(tmp_path / how, **CARTPOLE, vectorization=how, total_steps=4 * 8 * 4)
        trainer = hf.Trainer(settings)
        trainer.run()
        trainer.env.close(), trainer.eval_env.close()
    assert record(tmp_path / "sync") == record(tmp_path / "async") == record(tmp_path / "workers")


def test_evaluation_with_an_environment_of_ones_own_needs_another_of_them(tmp_path: Path):
    env = vector_env(AutoresetMode.SAME_STEP, {}, {})
    with pytest.raises(ValueError, match="pass eval_env="):
        hf.Trainer(config(tmp_path / "run", num_envs=2, eval_every=1), env=env)
    trainer = hf.Trainer(config(tmp_path / "run", num_envs=2), env=env)
    with pytest.raises(ValueError, match="eval_env="):
        trainer.evaluate(3)
    other = vector_env(AutoresetMode.SAME_STEP, {})
    settings = config(tmp_path / "run", num_envs=2, eval_every=5, eval_episodes=2)
    hf.Trainer(settings, env=env, eval_env=other).run()
    assert float(read_progress(tmp_path / "run")[4]["eval/mean_return"]) == 2.0


def test_a_wrong_number_of_environments_is_named(tmp_path: Path):
    env = vector_env(AutoresetMode.SAME_STEP, {}, {})
    with pytest.raises(ValueError, match="has 2 copies, the config says num_envs=4"):
        hf.Trainer(config(tmp_path / "run"), env=env)


# --- the folder -----------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused_with_what_to_do(tmp_path: Path):
    hf.Trainer(config(tmp_path / "run")).run()
    kept = record(tmp_path / "run")
    with pytest.raises(FileExistsError, match=r"holdfast train --resume .*, remove it, or choose another"):
        hf.Trainer(config(tmp_path / "run")).run()
    assert record(tmp_path / "run") == kept


def test_the_folder_holds_the_settings_that_rerun_it(tmp_path: Path):
    hf.Trainer(config(tmp_path / "run")).run()
    again = hf.TrainConfig.load(tmp_path / "run" / "config.json")
    again.run_dir = str(tmp_path / "again")
    hf.Trainer(again).run()
    assert record(tmp_path / "run") == record(tmp_path / "again")
    assert {"time/fps", "rollout/ep_rew_mean", "train/approx_kl", "memory/rms"} <= read_progress(tmp_path / "run")[
        0
    ].keys()


def test_another_seed_is_another_run(tmp_path: Path):
    hf.Trainer(config(tmp_path / "one")).run()
    hf.Trainer(config(tmp_path / "two", seed=2)).run()
    assert record(tmp_path / "one") != record(tmp_path / "two")


def test_the_replay_check_runs_in_the_first_update_and_then_as_often_as_asked(tmp_path: Path):
    def checked(name: str, **settings: Any) -> list[int]:
        hf.Trainer(config(tmp_path / name, **settings)).run()
        return [int(row["update"]) for row in read_progress(tmp_path / name) if row["memory/replay_gap"] != "nan"]

    assert checked("often", replay_check_every=4) == [1, 5, 9]
    assert checked("once", replay_check_every=0) == [1]


def test_statistics_of_observations_and_rewards_stand_still_from_a_rollout_to_the_end_of_its_update(tmp_path: Path):
    moved: list[tuple[float, float]] = []

    class Watch(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            vector = next(m for m in trainer.policy.modules() if hasattr(m, "count"))
            moved.append((float(vector.count), trainer.algorithm.reward_scale.value))

    trainer = hf.Trainer(config(tmp_path / "run", normalize_obs=True, normalize_reward=True), callbacks=[Watch()])
    during: list[tuple[float, float]] = []
    update = trainer.algorithm.start_update

    def spying(*args: Any, **options: Any) -> Any:
        finish = update(*args, **options)
        vector = next(m for m in trainer.policy.modules() if hasattr(m, "count"))
        during.append((float(vector.count), trainer.algorithm.reward_scale.value))
        return finish

    trainer.algorithm.start_update = spying  # type: ignore[method-assign]
    trainer.run()
    assert moved == during and len(set(moved)) == 10
