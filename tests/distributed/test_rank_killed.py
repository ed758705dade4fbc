"""Ranks that are killed under `torchrun --max-restarts`: the job comes back each time, as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
import rank_jobs
from holdfast.distributed.ranks import RankLostError
from holdfast.runs import checkpoint
from holdfast.runs.log import read_progress

# Two deaths. In the lives after them one rank is late: who is early finds torchrun's store as the dead ones left it.
MORTAL = """
import os, signal, sys, time
from pathlib import Path
from holdfast.cli import commands as cli
from holdfast.training import trainer
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if (life, rank) in ((1, 0), (2, 1)):
    time.sleep(0.7)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

one_update, fsync = trainer.Trainer._one_update, os.fsync
def mortal_update(self):
    if (life, rank, self.update) == (0, 1, 3):
        die()
    return one_update(self)
def mortal_fsync(file):
    if (life, rank) == (1, 0) and any(Path("run/checkpoints").glob(".update_00000004*.tmp")):
        die()  # in the middle of a checkpoint
    fsync(file)
trainer.Trainer._one_update, os.fsync = mortal_update, mortal_fsync
sys.exit(cli.main(sys.argv[1:]))
"""
SETTINGS = dict(
    env="holdfast/TMaze-v0", hidden_size=8, num_envs=6, num_steps=8, minibatches=2, epochs=1, device="cpu",
    total_steps=6 * 8 * 6, checkpoint_every=2, final_eval_episodes=2, threads=1, tensorboard=False,
)  # fmt: skip


def train_until_rank_1_dies(config: hf.TrainConfig, line: Path) -> None:
    class Mortal(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            if trainer.ranks.rank == 1 and trainer.update == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        hf.Trainer(config, callbacks=[Mortal()]).run()
    except RankLostError as error:
        line.write_text(str(error))


@pytest.mark.parametrize("engine", [{}, {"reset": "learned"}], ids=["C", "autograd"])
def test_a_rank_whose_neighbor_is_killed_stops_at_once_with_one_line(tmp_path: Path, engine: dict[str, Any]):
    config = hf.TrainConfig(**SETTINGS, **engine, run_dir=str(tmp_path / "run"), quiet=True)
    with pytest.raises((EOFError, AssertionError)):  # rank 1 gives no result
        rank_jobs.run_ranks(2, train_until_rank_1_dies, config, tmp_path / "line")
    line = (tmp_path / "line").read_text()
    assert line.startswith("rank 0 lost another rank after update 3 of 6 (") and "\n" not in line
    assert line.endswith(f"start all ranks again with --resume {tmp_path / 'run'}")


def timeless(run: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_progress(run)]


def flags(settings: dict[str, Any]) -> list[str]:
    texts = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        texts += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return texts


def test_a_job_whose_ranks_are_killed_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2",
         "mortal.py", "train", *flags(SETTINGS), "--run-dir", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_RANK_TIMEOUT": "60"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    deaths = re.findall(rf"exitcode\s*: -{signal.SIGKILL.value}\b", done.stderr)
    assert len(deaths) >= 2, done.stderr[-3000:]
    resumed = [int(n) for n in re.findall(r"resumed from \S*update_0*(\d+)\.pt", done.stdout)]
    assert resumed == [2, 2], "update 4's checkpoint never came to be; rank 0 alone reports"

    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    rank_jobs.run_ranks(2, rank_jobs.train, hf.TrainConfig(**SETTINGS, run_dir=str(unbroken), quiet=True))
    assert [row["update"] for row in timeless(run)] == [str(n) for n in range(1, 7)], "nothing is logged twice"
    assert timeless(run) == timeless(unbroken), "to the bit"
    assert checkpoint.load(checkpoint.find(run))["steps"] == 6 * 8 * 6
    assert not list(run.rglob("*.tmp")), "what the interrupted write left is gone"
