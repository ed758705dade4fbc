"""Ranks killed from outside at any moment: while they import, meet, train, save or evaluate; and jobs of two machines."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from holdfast.runs import checkpoint
from holdfast.runs.log import read_progress

KILLS, UPDATES = 6, 400
FLAGS = f"""--env holdfast/TMaze-v0 --hidden-size 8 --num-envs 12 --num-steps 8 --minibatches 2 --epochs 1 --device cpu
    --total-steps {12 * 8 * UPDATES} --checkpoint-every 5 --eval-every 20 --eval-episodes 2 --final-eval-episodes 2
    --threads 1 --no-tensorboard --run-dir run""".split()


MORTAL = """
import os, signal, sys
from pathlib import Path
from holdfast.cli import commands as cli
from holdfast.training import trainer
one_update = trainer.Trainer._one_update
def mortal(self):
    if os.environ["RANK"] == "1" and self.update == 7 and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return one_update(self)
trainer.Trainer._one_update = mortal
sys.exit(cli.main(sys.argv[1:]))
"""


def test_machines_go_on_together_though_each_counts_restarts_for_itself(tmp_path: Path):
    """Two torchruns stand for two machines. The one whose process did not die may not count a restart at all."""
    (tmp_path / "mortal.py").write_text(MORTAL)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
    machines = [
        subprocess.Popen(
            [sys.executable, *launcher, "mortal.py", "train", *FLAGS, "--total-steps", str(12 * 8 * 20)],
            cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_RANK_TIMEOUT": "120"},
        )
        for _ in range(2)
    ]  # fmt: skip
    outputs = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(text[-3000:] for text in outputs)
    assert sum(text.count("resumed from run/checkpoints/update_00000005.pt") for text in outputs) == 1
    assert [int(row["update"]) for row in read_progress(tmp_path / "run")] == list(range(1, 21))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_job_outlives_kills_at_random(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "--max-restarts", str(KILLS)]
    job = subprocess.Popen(
        [sys.executable, *launcher, "-m", "holdfast", "train", *FLAGS],
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_RANK_TIMEOUT": "120"},
    )  # fmt: skip
    agent, killed = psutil.Process(job.pid), 0
    try:
        while killed < KILLS and job.poll() is None:
            time.sleep(chance.uniform(0.5, 12))  # a life is some seconds of imports, then of training
            ranks = agent.children() if job.poll() is None else []
            if ranks:
                chance.choice(ranks).send_signal(signal.SIGKILL)
                killed += 1
        output, _ = job.communicate(timeout=300)
    finally:
        for process in [*agent.children(recursive=True), agent] if job.poll() is None else []:
            process.kill()
    assert job.returncode == 0, output[-5000:]
    assert killed >= 3, "the job was over too soon to be a test"
    run = tmp_path / "run"
    assert [int(row["update"]) for row in read_progress(run)] == list(range(1, UPDATES + 1)), "each once"
    assert checkpoint.load(checkpoint.find(run))["steps"] == 12 * 8 * UPDATES
    assert not list(run.rglob("*.tmp"))
