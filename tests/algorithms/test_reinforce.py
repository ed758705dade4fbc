"""An algorithm that is not part of Holdfast (`tests/reinforce.py`) trains, resumes, plots, exports and is examined like ours."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.cli import main
from holdfast.config import settings_of
from holdfast.runs import checkpoint
from holdfast.runs.log import read_progress
from holdfast.sweep.space import default_space
from reinforce import Reinforce, ReinforceConfig

TASK: dict[str, Any] = dict(
    env="holdfast/RepeatPreviousEasy-v0", env_kwargs={"k": 1}, gamma=0.5, core="gru", hidden_size=16, num_envs=16, num_steps=32,
    epochs=2, minibatches=4, learning_rate=0.01, adam_eps=1e-8, device="cpu", threads=1, quiet=True, tensorboard=False,
)  # fmt: skip
FLAGS = [
    "train", "--algorithm", "reinforce:Reinforce", "--env-args", "k=1", "--gamma", "0.5", "--core", "gru", "--hidden-size", "16",
    "--num-envs", "16", "--num-steps", "32", "--epochs", "2", "--minibatches", "4", "--learning-rate", "0.01", "--adam-eps", "1e-8",
    "--device", "cpu", "--threads", "1", "--quiet", "--no-tensorboard", "--checkpoint-every", "3", "--final-eval-episodes", "20",
]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns(tmp_path: Path, seed: int):
    config = ReinforceConfig(**TASK, seed=seed, total_steps=40_000, run_dir=str(tmp_path / "run"))
    trainer = hf.Trainer(config, algorithm=Reinforce)
    result = trainer.run()
    assert result.mean_return > 0.9 and trainer.config.algorithm == "reinforce:Reinforce"
    row = read_progress(tmp_path / "run")[-1]
    assert float(row["train/baseline_loss"]) < 0.01 and "train/approx_kl" not in row
    assert trainer.engines["update"] == "autograd, because the update in C knows PPO's loss, and this is ReinforceLoss"


def test_a_killed_run_resumes_to_the_rows_of_an_unbroken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "holdfast", *FLAGS, "--run-dir", "killed", "--total-steps", "20000"]
    with subprocess.Popen(command, env=here) as process:
        for _ in range(600):
            time.sleep(0.05)
            if checkpoint.rolling(tmp_path / "killed"):
                break
        process.send_signal(signal.SIGKILL)
    assert checkpoint.rolling(tmp_path / "killed") and len(read_progress(tmp_path / "killed")) < 40
    assert main(["train", "--resume", "killed", "--allow-imports"]) == 0
    assert main([*FLAGS, "--run-dir", "whole", "--total-steps", "20000"]) == 0
    for mine, theirs in zip(read_progress(tmp_path / "killed"), read_progress(tmp_path / "whole"), strict=True):
        kept = [name for name in theirs if not name.startswith("time/")]
        assert {name: mine[name] for name in kept} == {name: theirs[name] for name in kept}


def test_it_is_plotted_loaded_exported_shared_and_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    assert main([*FLAGS, "--run-dir", "run", "--total-steps", "2048"]) == 0
    for command in ("plot run -o curves.png", "eval run --episodes 4 --allow-imports", "info run"):
        assert main(command.split()) == 0, command
    assert main(["export", "run", "-o", "policy.onnx", "--allow-imports"]) == 0
    policy = hf.load("run", allow_imports=True)
    hf.save_pretrained(policy, "shared")
    assert all(torch.equal(a, b) for a, b in zip(hf.load("shared").state_dict().values(), policy.state_dict().values()))
    assert hf.doctor.examine(policy).ok


def test_a_setting_that_is_declared_once_is_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    with pytest.raises(SystemExit):
        main(["train", "--algorithm", "reinforce:Reinforce", "--help"])
    assert "--baseline-weight" in (text := capsys.readouterr().out) and "Weight of the loss of the baseline" in text
    assert "--clip-range" not in text
    with pytest.raises(ValueError, match=r"baseline_weight=-1 must be at least 0"):
        ReinforceConfig(baseline_weight=-1)
    assert main(["train", "--algorithm", "reinforce:Reinforce", "--baseline-weight", "-1"]) == 2
    assert "--baseline-weight -1.0 must be at least 0" in capsys.readouterr().err
    config = ReinforceConfig(**TASK, baseline_weight=0.25, algorithm="reinforce:Reinforce")
    plain = ReinforceConfig(baseline_weight=0.25, algorithm="reinforce:Reinforce")
    assert plain.automatic_name == "Reinforce-lstm-baseline0.25-seed1"
    assert {p.name: (p.low, p.high) for p in default_space(config)}["baseline_weight"] == (0.0625, 1.0)
    assert not settings_of(ReinforceConfig)["baseline_weight"].fixed
    monkeypatch.chdir(tmp_path)
    hf.Trainer(dataclasses.replace(config, total_steps=512, run_dir="run"), algorithm=Reinforce).run()
    resumed = hf.Trainer.resume("run", total_steps=1024, baseline_weight=0.75, algorithm=Reinforce)
    assert resumed.config.baseline_weight == 0.75 and resumed.run().steps == 1024
    assert hf.RunConfig.load("run/config.json", allow_imports=True).baseline_weight == 0.75
    with pytest.raises(ValueError, match="hidden_size=32 cannot change when a run is resumed"):
        hf.Trainer.resume("run", total_steps=2048, hidden_size=32, algorithm=Reinforce)


def test_a_config_of_another_algorithm_is_refused():
    with pytest.raises(TypeError, match="Reinforce takes a ReinforceConfig, got a PPOConfig"):
        hf.Trainer(hf.PPOConfig(), algorithm=Reinforce)
    with pytest.raises(ValueError, match=r"names no algorithm; .*pass algorithm=MyAlgorithm"):
        hf.Trainer(ReinforceConfig())
