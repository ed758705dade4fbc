"""Ranks of one machine exchange numbers through shared memory: the same bits on all, and nobody waits for the dead."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast as hf
import rank_jobs
from holdfast.distributed import shared_memory
from holdfast.distributed.ranks import Ranks, is_lost_rank
from holdfast.distributed.shared_memory import SLOT_BYTES, RankEndedError, RankLateError
from holdfast.kernels.cpu import library
from rank_jobs import run_ranks

pytestmark = pytest.mark.skipif(
    library.load().handle is None or not shared_memory.FOLDER.is_dir(), reason="needs the C library and /dev/shm"
)
COUNTS = (1, 2, 17, 1000, SLOT_BYTES // 4 + 33)  # fewer than ranks, no whole cache lines, more than one slot


def numbers(seed: int, rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (100 * torch.randn(count, generator=generator, dtype=torch.float64)).to(dtype)


def exchanges(seed: int) -> dict[str, Any]:
    """Sums and gathers of numbers that differ between ranks."""
    mine = rank_jobs.ranks()
    assert mine.shared is not None, "these ranks are on one machine"
    kinds = [(torch.float32, count) for count in COUNTS] + [(torch.float64, 50), (torch.int32, 50)]
    wide = numbers(seed, mine.rank, 12).view(3, 4)
    every_other = wide[:, ::2]
    mine.sum_(every_other)
    return {
        "sums": [mine.sum(numbers(seed, mine.rank, count, dtype)) for dtype, count in kinds],
        "scalar": mine.sum(torch.tensor(1 + mine.rank)),
        "strided": wide,
        "gathered": [mine.shared.all_gather(numbers(seed, mine.rank, count)) for count in COUNTS],
    }


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_same_bits_and_they_are_the_sum_in_the_order_of_ranks(size: int):
    results = run_ranks(size, exchanges, size)
    of_ranks = [[numbers(size, rank, count) for rank in range(size)] for count in COUNTS]
    for rank, result in enumerate(results):
        for found, parts in zip(result["sums"], of_ranks):
            assert torch.equal(found, functools.reduce(torch.add, parts))
        assert [x.dtype for x in result["sums"][-2:]] == [torch.float64, torch.int32]
        assert all(torch.equal(a, b) for a, b in zip(result["sums"], results[0]["sums"]))
        assert result["scalar"] == size * (size + 1) // 2 and result["scalar"].dtype is torch.int64
        assert all(torch.equal(a, torch.stack(b)) for a, b in zip(result["gathered"], of_ranks))
        own = numbers(size, rank, 12).view(3, 4)
        whole = sum(numbers(size, other, 12).view(3, 4) for other in range(size))
        assert torch.equal(result["strided"][:, 1::2], own[:, 1::2]), "what is between stays"
        torch.testing.assert_close(result["strided"][:, ::2], whole[:, ::2])


def train_through(config: hf.TrainConfig, shared: bool) -> tuple[bool, torch.Tensor]:
    os.environ["HOLDFAST_SHARED_MEMORY"] = "1" if shared else "0"
    return rank_jobs.ranks().shared is not None, rank_jobs.train(config)["weights"]


def test_two_ranks_train_the_same_weights_through_shared_memory_and_through_gloo(tmp_path: Path):
    found = []
    for shared in (True, False):
        config = hf.TrainConfig(
            env="holdfast/TMaze-v0", hidden_size=8, num_envs=6, num_steps=8, total_steps=6 * 8 * 4, minibatches=2,
            device="cpu", threads=1, quiet=True, tensorboard=False, final_eval_episodes=1, checkpoint_every=0,
            normalize_obs=True, run_dir=str(tmp_path / str(shared)),
        )  # fmt: skip
        ((used, weights), (_, others)) = run_ranks(2, train_through, config, shared)
        assert used is shared and torch.equal(weights, others)
        found.append(weights)
    assert torch.equal(*found), "a sum of two does not depend on its order"


# --- ranks that end, or do not answer --------------------------------------------------------------------------------


def outlive(folder: Path, how: str) -> tuple[str, float]:
    """Rank 1 goes away after its first sum; what the others get, and after how many seconds."""
    mine, x = rank_jobs.ranks(), torch.ones(100)
    assert mine.shared is not None
    mine.sum_(x)
    if mine.rank == 1:
        folder.joinpath("pid").write_text(str(os.getpid()))
        if how == "sleep":
            time.sleep(3)
            return "", 0.0
        time.sleep(30)
    while not (folder / "pid").exists():
        time.sleep(0.01)
    if how == "kill" and mine.rank == 0:
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankEndedError) as caught:
        mine.sum_(x)
    seconds = time.monotonic() - began
    (folder / f"{mine.rank}").write_text(f"{type(caught.value).__name__}: {caught.value}")
    while not all((folder / str(rank)).exists() for rank in range(mine.size) if rank != 1):
        time.sleep(0.01)  # the first result ends them all
    return str(caught.value), seconds


def test_a_rank_that_is_killed_ends_the_wait_of_all_others_with_a_line_that_names_it(tmp_path: Path):
    with pytest.raises((EOFError, AssertionError)):  # it gives no result
        run_ranks(3, outlive, tmp_path, "kill")
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        assert text.startswith(f"RankEndedError: rank 1 has ended while rank {rank} waited for it"), text


def test_a_rank_that_runs_but_does_not_answer_is_given_up_after_the_timeout(tmp_path: Path):
    first, _ = run_ranks(2, outlive_with_timeout, tmp_path)
    text, seconds = first
    assert text.startswith("rank 0 waited 1 seconds for rank 1, which runs but does not answer") and 1 <= seconds < 3
    assert is_lost_rank(RankLateError(text)), "so that the run ends with one line, as when a rank is killed"


def outlive_with_timeout(folder: Path) -> tuple[str, float]:
    os.environ["HOLDFAST_RANK_TIMEOUT"] = "1"
    return outlive(folder, "sleep")


# --- where there is no shared memory ---------------------------------------------------------------------------------


def without(obstacle: str) -> tuple[bool, float, list[str]]:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if obstacle == "one rank refuses" and rank == 1:
            patch.setenv("HOLDFAST_SHARED_MEMORY", "0")
        if obstacle == "another machine" and rank == 1:
            patch.setattr(os, "open", lambda path, *_: (_ for _ in ()).throw(FileNotFoundError(path)))
        if obstacle == "another file of that name" and rank == 1:
            patch.setattr(os, "pread", lambda *_: b"something else")
        if obstacle == "no room":
            patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        if obstacle == "no C library" and rank == 0:
            patch.setattr(library, "load", lambda: library.Library(None, reason="no compiler"))
        mine: Ranks = rank_jobs.ranks()
    return (
        mine.shared is not None,
        float(mine.sum(torch.tensor(1.0))),
        [p.name for p in Path("/dev/shm").glob("holdfast-*")],
    )


@pytest.mark.parametrize(
    "obstacle", ["one rank refuses", "another machine", "another file of that name", "no room", "no C library"]
)
def test_all_ranks_use_gloo_if_any_cannot_share_memory(obstacle: str):
    for shared, total, _ in run_ranks(2, without, obstacle):
        assert not shared and total == 2.0


def test_nothing_is_left_in_dev_shm_while_ranks_run():
    before = {p.name for p in Path("/dev/shm").glob("holdfast-*")}
    for shared, _, names in run_ranks(2, without, ""):
        assert shared and not set(names) - before
