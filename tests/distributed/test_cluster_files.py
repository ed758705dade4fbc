"""The files for Slurm and SkyPilot, with a cluster of two machines that is this one: two torchruns meet and train one run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.runs.log import read_progress

yaml = pytest.importorskip("yaml")
CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
SBATCH, SKYPILOT = CLUSTER / "slurm.sbatch", CLUSTER / "skypilot.yaml"

# Two machines: the command twice, as srun would start it on each.
SRUN = """#!/bin/bash
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second
"""
TRAIN = [
    "--env", "holdfast/TMaze-v0", "--hidden-size", "8", "--num-envs-per-rank", "3", "--num-steps", "8", "--minibatches", "1",
    "--epochs", "1", "--device", "cpu", "--total-steps", "144", "--final-eval-episodes", "2", "--threads", "1",
    "--no-tensorboard", "--quiet",
]  # fmt: skip


def a_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def a_free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_slurms_file_trains_one_run_on_two_machines(tmp_path: Path):
    a_program(tmp_path / "bin", "srun", SRUN)
    a_program(tmp_path / "bin", "scontrol", "#!/bin/bash\necho 127.0.0.1\necho 127.0.0.2\n")
    job = dict(SLURM_JOB_NAME="holdfast", SLURM_JOB_NODELIST="n[0-1]", SLURM_NNODES="2", SLURM_JOB_ID="7")
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **job, "PATH": path, "PORT": a_free_port()}
    env.pop("SLURM_GPUS_ON_NODE", None)
    command = ["bash", str(SBATCH), *TRAIN]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_progress(tmp_path / "runs" / "holdfast")
    assert [int(row["steps"]) for row in rows] == [48, 96, 144], "of 3 environments on each of two ranks"
    assert json.loads((tmp_path / "runs/holdfast/config.json").read_text())["num_envs"] == 6


def test_skypilots_file_gives_torchrun_the_same_command():
    task = yaml.safe_load(SKYPILOT.read_text())
    assert task["num_nodes"] > 1 and task["run"].startswith("set -euo pipefail")
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)

    def command(script: str) -> str:
        """From `python` on, with Slurm's and SkyPilot's variables under one name."""
        text = " ".join(script[script.index("python -m torch.distributed.run") :].replace("\\\n", " ").split())
        names = {"SLURM_NNODES": "N", "SKYPILOT_NUM_NODES": "N", "SLURM_JOB_ID": "ID", "SKYPILOT_TASK_ID": "ID"}
        names |= {"SLURM_GPUS_ON_NODE": "G", "SKYPILOT_NUM_GPUS_PER_NODE": "G"}
        return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], text)

    assert command(task["run"]) == command(SBATCH.read_text())


def test_skypilots_script_starts_a_run_and_goes_on_with_one_that_has_a_checkpoint(tmp_path: Path):
    task = yaml.safe_load(SKYPILOT.read_text())
    a_program(tmp_path / "bin", "python", '#!/bin/bash\necho "$@"\n')
    given = dict(SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NUM_NODES="2", SKYPILOT_TASK_ID="7")
    env = {**os.environ, **{k: str(v) for k, v in task["envs"].items()}, **given, "RUN": str(tmp_path / "run")}
    env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    run = ["bash", "-c", task["run"]]
    started = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
    assert "--rdzv-endpoint 10.0.0.1:29400" in started and "--num-envs-per-rank 8192" in started
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "update_00000001.pt").touch()
    again = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
    assert again.rstrip().endswith(f"-m holdfast train --resume {tmp_path / 'run'}")
