"""A rank that is killed under `torchrun --max-restarts`. Here and not in the quick suite because torchrun's own restart
takes long now and then: the new processes do not always find each other at the first try."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import checkpoint
from holdfast.run_log import read_progress

MORTAL = """
import os, signal, sys
from holdfast import cli, trainer
first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
one_update = trainer.Trainer._one_update
def mortal(self):
    if first_life and self.ranks.rank == 1 and self.update == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return one_update(self)
trainer.Trainer._one_update = mortal
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.xfail(
    strict=False, reason="after a restart gloo's ranks sometimes refuse each other's connections: cause not found"
)
def test_a_job_whose_rank_is_killed_comes_back_from_its_checkpoint_and_logs_nothing_twice(tmp_path: Path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    flags = dict(
        env="holdfast/TMaze-v0", hidden_size=8, num_envs=6, num_steps=8, minibatches=2, epochs=1, device="cpu",
        total_steps=6 * 8 * 9, checkpoint_every=2, final_eval_episodes=2, run_dir="run", threads=1,
    )  # fmt: skip
    arguments = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3",
         "mortal.py", "train", *arguments, "--no-tensorboard"],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_RANK_TIMEOUT": "60"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed from" in done.stdout and f"exitcode: -{signal.SIGKILL.value}" in done.stderr.replace(
        "exitcode  :", "exitcode:"
    )
    assert [int(row["update"]) for row in read_progress(tmp_path / "run")] == list(range(1, 10))
    assert checkpoint.load(checkpoint.find(tmp_path / "run"))["steps"] == 6 * 8 * 9
    assert done.stdout.count("fresh episodes") == 1, "rank 0 alone reports"
