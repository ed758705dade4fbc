"""SAC and R2D2 over ranks: each its own environments and buffer, one gradient, equal weights; all take a step or none does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
import rank_jobs
from holdfast.runs.log import read_progress
from rank_jobs import run_ranks

SMALL: dict[str, Any] = dict(
    env="holdfast/RepeatPreviousEasy-v0", hidden_size=8, head_sizes=(8,), num_envs=4, num_steps=8, total_steps=192, batch_size=4,
    train_length=8, burn_in=0, warmup_steps=0, update_ratio=0.0625, buffer_size=4000, checkpoint_every=2, final_eval_episodes=2,
    tensorboard=False, quiet=True, device="cpu", threads=1, lr_schedule="constant",
)  # fmt: skip


@pytest.mark.parametrize("config", [hf.SACConfig, hf.R2D2Config])
def test_ranks_learn_the_same_from_buffers_of_their_own_and_resume_as_if_never_stopped(tmp_path: Path, config: Any):
    whole = run_ranks(2, rank_jobs.train_from_buffer, config(**SMALL, run_dir=str(tmp_path / "whole")))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(whole[0]["weights"], whole[1]["weights"]))
    assert not torch.equal(whole[0]["stored"], whole[1]["stored"])
    assert whole[0]["gradient_steps"] == 2 * 5, "a segment is shorter than a sequence and its successor"
    run_ranks(2, rank_jobs.train_from_buffer, config(**SMALL, run_dir=str(tmp_path / "part")), 4)
    again = run_ranks(2, rank_jobs.resume_from_buffer, tmp_path / "part")
    for one, other in zip(whole, again):
        assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"]))
        assert torch.equal(one["stored"], other["stored"])
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "buffer-rank1")
    with pytest.raises(AssertionError, match=r"rank 0 of 2:(.|\n)*CheckpointError(.|\n)*buffer-rank1"):
        run_ranks(2, rank_jobs.resume_from_buffer, tmp_path / "part", 256)


def test_a_gradient_over_ranks_is_that_of_one_process_with_all_sequences():
    alone = rank_jobs.gradient_of_sequences(0)
    several = run_ranks(2, rank_jobs.gradient_of_sequences, 3)
    assert all(torch.allclose(a, b, atol=1e-6) for result in several for a, b in zip(result, alone, strict=True))


def test_a_rank_whose_buffer_fills_later_is_waited_for(tmp_path: Path):
    """Truncated episodes have a row more, so one rank can sample an update before the other."""
    config = hf.R2D2Config(**{**SMALL, "train_length": 11, "run_dir": str(tmp_path)})
    results = run_ranks(2, rank_jobs.train_unevenly, config)
    assert [float(row["train/gradient_steps"]) for row in read_progress(tmp_path)] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert all(torch.equal(a, b) for a, b in zip(results[0]["weights"], results[1]["weights"]))
