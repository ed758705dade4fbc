"""Several seeds side by side, and what they come to together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.cli import main
from holdfast.cli import seeds as sweep
from holdfast.display.aggregate import bootstrap_interval, interquartile_mean
from holdfast.runs.log import read_progress

FLAGS = str.split(
    "train --env holdfast/TMaze-v0 --env-args length=3 --hidden-size 8 --num-envs 4 --num-steps 8 --minibatches 2 "
    "--total-steps 128 --final-eval-episodes 4 --device cpu --no-tensorboard --threads 1 --quiet"
)


def test_the_interquartile_mean_leaves_out_the_lowest_and_highest_quarter():
    scores = np.array([[9.0], [1.0], [2.0], [3.0], [-50.0], [4.0], [100.0], [5.0]])
    assert interquartile_mean(scores) == [(2 + 3 + 4 + 5) / 4]
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0, "of three, all count"


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        low, high = bootstrap_interval([random.normal(1.0, 2.0, 20)], seed=trial)
        hits += low <= 1.0 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_runs_are_resampled_within_their_task():
    # Two tasks of scores 0 and 1: however the runs fall, half of all scores are 0.
    zeros, ones = np.zeros(8), np.ones(8)
    np.testing.assert_array_equal(bootstrap_interval([zeros, ones]), [0.5, 0.5])
    low, high = bootstrap_interval([np.concatenate([zeros, ones])])
    assert low < 0.4 and high > 0.6


def test_seeds_side_by_side_are_the_runs_they_would_be_alone(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    assert main([*FLAGS, "--seeds", "3", "5"]) == 0
    said = capsys.readouterr().out
    assert "seed 3  return" in said and "seed 5  return" in said
    assert "over 2 seeds (interquartile mean, 95% bootstrap interval)" in said
    runs = tmp_path / "runs" / "TMaze-v0"
    results = [json.loads((runs / f"lstm-seed{seed}" / "result.json").read_text()) for seed in (3, 5)]
    assert [result["steps"] for result in results] == [128, 128]

    assert main([*FLAGS, "--seed", "5", "--run-dir", "alone"]) == 0
    rows, alone = read_progress(runs / "lstm-seed5"), read_progress(tmp_path / "alone")
    assert len(alone) == 4
    for row, other in zip(rows, alone):
        assert {k: v for k, v in row.items() if "time/" not in k} == {
            k: v for k, v in other.items() if "time/" not in k
        }
    assert results[1]["mean_return"] == json.loads((tmp_path / "alone" / "result.json").read_text())["mean_return"]


def test_a_seed_that_fails_is_named_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    calls: list[int] = []

    def fake(config: Any, folder: Path, threads: int) -> tuple[str, str]:
        calls.append(config.seed)
        return "return 1.000", "the GPU is on fire" if config.seed == 2 else ""

    monkeypatch.setattr(sweep, "_train", fake)
    assert main([*FLAGS, "--seeds", "1", "2", "3"]) == 2
    out, err = capsys.readouterr()
    assert sorted(calls) == [1, 2, 3] and "seed 2  the GPU is on fire" in out
    assert err.strip() == "holdfast train: seed 2: the GPU is on fire"


@pytest.mark.parametrize(
    ("flags", "words"), [(["--seeds", "1", "1"], "names a seed twice"), (["--seeds", "1", "2"], "leave torchrun out")]
)
def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], words: str):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    assert main([*FLAGS, *flags]) == 2
    assert words in capsys.readouterr().err
