"""Several processes train as one does: gradients, statistics, curves; checkpoints move between numbers of ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
import rank_jobs
from holdfast.distributed.ranks import Ranks, join, pick_device
from holdfast.envs import make
from holdfast.rollout.collector import Collector
from holdfast.runs.log import read_progress
from rank_jobs import run_ranks

SMALL = dict(
    env="holdfast/RepeatPreviousEasy-v0", hidden_size=8, num_envs=12, num_steps=8, minibatches=2, epochs=2,
    total_steps=12 * 8 * 6, checkpoint_every=2, final_eval_episodes=2, tensorboard=False, quiet=True, device="cpu",
    threads=1, normalize_reward=True,
)  # fmt: skip


CRITICAL = 2.75  # of Welch's t, two-sided, 1%


def welch(some: list[float], others: list[float]) -> float:
    """How many of its errors the difference of two means is from 0."""
    error = np.sqrt(np.var(some, ddof=1) / len(some) + np.var(others, ddof=1) / len(others))
    return float((np.mean(some) - np.mean(others)) / error)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def stored_segment(folder: Path, num_envs: int, dummies: bool, core: str = "lstm", **more: Any) -> str:
    """A policy and a rollout of it with advantages that need normalising, on disk for the ranks."""
    torch.manual_seed(0)
    env = make("holdfast/TMaze-v0", num_envs, env_kwargs={"length": 3})
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core=core, hidden_size=16)
    collector = Collector(env, policy, 10, seed=0)
    collector.rollout()
    segment = collector.rollout()
    valid = torch.rand(10, num_envs) < 0.7 if dummies else segment.valid
    advantage = torch.randn(10, num_envs) * torch.linspace(1, 5, num_envs) + torch.arange(num_envs)
    segment = segment.changed(advantage=advantage, returns=segment.value + advantage)
    segment.valid = valid
    folder.mkdir(exist_ok=True)
    file = folder / "segment.pt"
    torch.save({"policy": policy, "segment": segment, **more}, file)
    return str(file)


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_gradient_over_ranks_is_that_of_one_process(tmp_path: Path, size: int):
    # Environments that come out even and all of whose steps count; and neither; and with another cell.
    files = [stored_segment(tmp_path / "even", 12, False), stored_segment(tmp_path / "uneven", 11, True)]
    files += [stored_segment(tmp_path / "gru", 11, True, core="gru")]
    config = hf.TrainConfig(minibatches=1, epochs=2, learning_rate=1e-30)
    alone = rank_jobs.first_updates(files, config)
    for results in run_ranks(size, rank_jobs.first_updates, files, config):
        for result, expected in zip(results, alone):
            assert len(result["gradients"]) == 2
            assert relative(result["gradients"][0], expected["gradients"][0]) < 1e-6
            for name, number in expected["metrics"].items():
                assert result["metrics"][name] == pytest.approx(number, rel=1e-4, abs=1e-6), name


def test_a_gradient_that_is_not_averaged_normalised_or_weighted_over_ranks_would_show(tmp_path: Path):
    file = stored_segment(tmp_path, 11, True)
    config = hf.TrainConfig(minibatches=1, epochs=1, learning_rate=1e-30)
    expected = rank_jobs.first_update(file, config)["gradients"][0]
    wrong = run_ranks(3, rank_jobs.first_updates_broken, file, config)[0]
    assert all(relative(result["gradients"][0], expected) > 0.01 for result in wrong.values()), wrong


def test_whole_updates_over_ranks_take_the_steps_of_one_process(tmp_path: Path):
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    file = stored_segment(tmp_path, 11, True, minibatches=list(order.split(4)))
    config = hf.TrainConfig(minibatches=3, epochs=3, learning_rate=0.01, target_kl=1e-4)
    alone = rank_jobs.first_update(file, config)
    results = run_ranks(2, rank_jobs.first_update, file, config)
    assert torch.equal(results[0]["weights"], results[1]["weights"]), "ranks never drift apart"
    assert relative(results[0]["weights"], alone["weights"]) < 1e-4
    assert results[0]["metrics"]["train/epochs"] == alone["metrics"]["train/epochs"] < 3, "they stop at the same epoch"


def test_statistics_of_observations_and_rewards_are_those_of_all_ranks():
    torch.manual_seed(0)
    observations, rewards = torch.randn(9, 7, 2) * 3 + 1, torch.randn(9, 7)
    data = observations, rewards, torch.rand(9, 7) < 0.2, spaces.Box(-9, 9, (2,))
    alone = rank_jobs.statistics(*data)
    for result in run_ranks(3, rank_jobs.statistics, *data):
        for one, other in zip(result, alone):
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-5, atol=1e-7)


def test_the_learning_curve_with_ranks_is_that_of_one_process():
    # With 2 and 4 ranks, more seeds and another thing broken: tests/learning/test_rank_curves.py.
    alone, seeds = rank_jobs.areas(range(24)), range(100, 108)
    assert abs(welch(run_ranks(3, rank_jobs.areas, seeds)[0], alone)) < CRITICAL
    # It would show: where each rank learns from its own third the area is 3.5 less, 7 times the error of the difference.
    assert welch(run_ranks(3, rank_jobs.areas, seeds, "own gradients")[0], alone) < -CRITICAL


@pytest.mark.parametrize(
    "settings",
    [
        dict(reset="learned", core="gru", minibatches=1, num_steps=4),  # in most minibatches no episode begins
        dict(critic_core="separate", bptt=4, refresh_states=True, target_kl=0.01, eval_every=2, eval_episodes=3),
        dict(core="none", normalize_obs=True, env="holdfast/PositionOnlyCartPoleEasy-v0", stop_at=-1.0),
        dict(env="CartPole-v1", mask_velocity=True, normalize_reward=False, inputs=("obs", "prev_action")),
    ],
)
def test_ranks_stay_together_under_all_kinds_of_settings(tmp_path: Path, settings: dict[str, Any]):
    config = hf.TrainConfig(**{**SMALL, **settings, "run_dir": str(tmp_path)})
    results = run_ranks(2, rank_jobs.train, config)
    assert torch.equal(results[0]["weights"], results[1]["weights"]) and results[0]["weights"].isfinite().all()
    assert results[0]["mean_return"] == results[1]["mean_return"]
    assert results[0]["steps"] == results[1]["steps"] == int(read_progress(tmp_path)[-1]["steps"])


def test_a_nan_on_one_rank_is_skipped_on_all(tmp_path: Path):
    env_kwargs = {"folder": str(tmp_path), "how": "nan obs", "times": 1}
    settings = {**SMALL, "env": "failing_env:Failing-v0", "env_kwargs": env_kwargs, "normalize_reward": False}
    config = hf.TrainConfig(**{**settings, "normalize_obs": True, "run_dir": str(tmp_path / "run")})
    results = run_ranks(2, rank_jobs.train, config)
    assert torch.equal(results[0]["weights"], results[1]["weights"]) and results[0]["weights"].isfinite().all()
    assert [float(row["train/skipped_steps"]) for row in read_progress(tmp_path / "run")] == [4.0] + [0.0] * 5
    kept = sorted(path.name for path in (tmp_path / "run" / "nonfinite").iterdir())
    assert kept == ["update_00000001-rank0.pt", "update_00000001-rank1.pt"]


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_four_ranks_goes_on_with_any_number_and_every_environment_keeps_its_memory(tmp_path: Path):
    config = hf.TrainConfig(**{**SMALL, "num_envs": 10, "run_dir": str(tmp_path / "four")})
    parts = run_ranks(4, rank_jobs.train, config, 3)
    assert len({part["seeds"] for part in parts}) == 4, "ranks have seeds and random numbers of their own"
    assert len({tuple(part["weights"].tolist()) for part in parts}) == 1
    before = {name: torch.cat([part["environments"][name] for part in parts]) for name in parts[0]["environments"]}
    assert len(before["memory 0"].unique(dim=0)) == 10 and before["memory 0"].any(-1).all(), "each has its own"
    for size in (1, 2, 3):
        resumed = run_ranks(size, rank_jobs.resume, tmp_path / "four", str(tmp_path / str(size)), 2)
        after = {name: torch.cat([part["environments"][name] for part in resumed]) for name in before}
        for name in before:
            assert torch.equal(before[name], after[name]), (size, name)
        assert not any(part["restarted"] for part in resumed)
        assert {part["steps"] for part in resumed} == {5 * 10 * 8}


def test_as_many_ranks_go_on_exactly_as_if_never_stopped(tmp_path: Path):
    whole = run_ranks(2, rank_jobs.train, hf.TrainConfig(**SMALL, run_dir=str(tmp_path / "whole")))
    run_ranks(2, rank_jobs.train, hf.TrainConfig(**SMALL, run_dir=str(tmp_path / "part")), 4)
    resumed = run_ranks(2, rank_jobs.resume, tmp_path / "part", str(tmp_path / "part"), 10**9)
    assert all(torch.equal(a["weights"], b["weights"]) for a, b in zip(whole, resumed))
    rows, again = read_progress(tmp_path / "whole"), read_progress(tmp_path / "part")
    timeless = [[{k: v for k, v in row.items() if not k.startswith("time/")} for row in run] for run in (rows, again)]
    assert timeless[0] == timeless[1] and len(rows) == 6


# --- small things ----------------------------------------------------------------------------------------------------


def test_one_process_is_left_as_it_was():
    alone, x = Ranks(), torch.tensor([1.0])
    assert alone.sum(x) is x and alone.gather(3) == [3] and alone.from_leader("a") == "a"
    assert alone.seed(5) == 5


def test_seeds_of_ranks_are_distinct_and_always_the_same():
    seeds = [Ranks(rank, 8, True).seed(seed) for rank in range(8) for seed in range(1, 9)]
    assert len(set(seeds)) == 64 and seeds[:8] == list(range(1, 9))
    assert seeds == [Ranks(rank, 4, True).seed(seed) for rank in range(8) for seed in range(1, 9)]


def test_too_few_environments_for_the_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("holdfast.distributed.ranks.join", lambda device: (Ranks(0, 8, True), torch.device("cpu")))
    monkeypatch.setattr("holdfast.distributed.ranks.require_equal_settings", lambda ranks, settings: None)
    with pytest.raises(ValueError, match=r"12 over 8 ranks leaves 1 environments .* too few for minibatches=2"):
        hf.Trainer(hf.TrainConfig(**SMALL, run_dir=str(tmp_path)))


def test_ranks_with_different_settings_are_refused_in_one_line_that_names_the_setting(tmp_path: Path):
    config = hf.TrainConfig(**SMALL, run_dir=str(tmp_path / "run"))
    errors = run_ranks(3, rank_jobs.train_with_odd_rank, config, 2, {"learning_rate": 0.25, "threads": 2})
    expected = "the ranks have different settings: learning_rate is 0.0007 on rank 0 and 0.25 on rank 2; "
    assert errors == [expected + "start all ranks with the same settings"] * 3
    assert not (tmp_path / "run").exists()
    same = run_ranks(2, rank_jobs.train_with_odd_rank, config, 1, {"threads": 2, "quiet": False})
    assert same == ["", ""], "what belongs to one process may differ"


LEAVE = """
import glob, sys
import holdfast as hf
from holdfast.distributed import ranks
trainer = hf.Trainer(hf.TrainConfig(**{settings}))
trainer.run()
def threads():
    return sorted(open(name).read().strip() for name in glob.glob("/proc/self/task/*/comm"))
assert [name for name in threads() if "gloo" in name], threads()
ranks.leave()
left = [name for name in threads() if "gloo" in name]
sys.exit(f"{left} still run: they abort the process when they release a tensor while it ends" if left else 0)
"""


def test_a_rank_that_leaves_ends_the_threads_of_its_group_while_its_trainer_still_exists(tmp_path: Path):
    program = LEAVE.replace("{settings}", repr({**SMALL, "total_steps": 1, "run_dir": str(tmp_path / "run")}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_process_without_a_gpu_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="process 2 of this machine has no GPU: torch sees 2"):
        pick_device("cuda", local_rank=2)


@pytest.mark.parametrize("text", ["soon", "-5", "0", "nan", "1e300"])
def test_a_patience_that_is_no_number_of_seconds_is_refused_by_its_name(text: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_RANK_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"HOLDFAST_RANK_TIMEOUT is '{text}', expected a number of seconds"):
        join("cpu")
