"""`--seeds`: one run per seed, side by side, and one result for all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main, seeds
from holdfast.runs import checkpoint
from holdfast.runs.log import read_progress

FLAGS = str.split(
    "train --env holdfast/TMaze-v0 --env-args length=3 --hidden-size 8 --num-envs 4 --num-steps 8 --minibatches 2 "
    "--total-steps 128 --final-eval-episodes 4 --device cpu --no-tensorboard --threads 1 --quiet"
)


ONE_AT_A_TIME = """
import sys
from holdfast.cli import main, seeds
seeds.num_cores = lambda: 1
sys.exit(main(sys.argv[1:]))
"""


def test_seeds_make_a_run_each_and_one_plot(train: Any, folder: Path):
    train("--seeds", 1, 2, "--quiet", steps=512)
    runs = folder / "runs/RepeatPreviousEasy-v0"
    assert sorted(path.name for path in runs.iterdir()) == ["lstm-h8-seed1", "lstm-h8-seed2", "lstm-h8-seeds.png"]
    configs = [json.loads((runs / f"lstm-h8-seed{seed}/config.json").read_text()) for seed in (1, 2)]
    assert [config["seed"] for config in configs] == [1, 2]


def test_seeds_side_by_side_are_the_runs_they_would_be_alone(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    assert main([*FLAGS, "--seeds", "3", "5"]) == 0
    said = capsys.readouterr().out
    assert "seed 3  return" in said and "seed 5  return" in said
    assert "over 2 seeds (mean, range)" in said, "which is what the numbers are"
    runs = tmp_path / "runs" / "TMaze-v0"
    results = [json.loads((runs / f"lstm-h8-length3-seed{seed}" / "result.json").read_text()) for seed in (3, 5)]
    assert [result["steps"] for result in results] == [128, 128]

    assert main([*FLAGS, "--seed", "5", "--run-dir", "alone"]) == 0
    rows, alone = read_progress(runs / "lstm-h8-length3-seed5"), read_progress(tmp_path / "alone")
    assert len(alone) == 4
    for row, other in zip(rows, alone):
        assert {k: v for k, v in row.items() if "time/" not in k} == {
            k: v for k, v in other.items() if "time/" not in k
        }
    assert results[1]["mean_return"] == json.loads((tmp_path / "alone" / "result.json").read_text())["mean_return"]


def test_every_command_with_seeds_draws_a_figure_of_its_own(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)

    def fake(config: Any, folder: Path) -> list[str]:
        config.folder.mkdir(parents=True, exist_ok=True)
        (config.folder / "result.json").write_text(json.dumps({"mean_return": float(config.seed)}))
        return ["-c", "print('return 1.000')"]

    def draw(runs: list[Path], out: Path, aggregate: str) -> Path:
        out.write_text(" ".join(run.name for run in runs))
        return out

    monkeypatch.setattr(seeds, "train_command", fake)
    monkeypatch.setattr(seeds, "draw", draw)
    for flags in ([], [], ["--learning-rate", "0.01"], ["--name", "mine"]):
        assert main([*FLAGS, *flags, "--seeds", "1", "2", "3", "4"]) == 0
    assert "return 2.500 [1.000, 4.000] over 4 seeds (interquartile mean, 95% bootstrap" in capsys.readouterr().out
    figures = {path.name: path.read_text().split()[0] for path in Path("runs/TMaze-v0").glob("*.png")}
    assert figures == {
        "lstm-h8-length3-seeds.png": "lstm-h8-length3-seed1",
        "lstm-h8-length3-seeds-2.png": "lstm-h8-length3-seed1-2",
        "lstm-h8-length3-lr0.01-seeds.png": "lstm-h8-length3-lr0.01-seed1",
        "mine-seeds.png": "mine-seed1",
    }


def test_a_seed_that_fails_is_named_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    calls: list[int] = []

    def fake(config: Any, folder: Path) -> list[str]:
        calls.append(config.seed)
        fails = "import sys; sys.exit('a traceback\\nthe GPU is on fire')"
        return ["-c", fails if config.seed == 2 else "print('return 1.000')"]

    monkeypatch.setattr(seeds, "train_command", fake)
    assert main([*FLAGS, "--seeds", "1", "2", "3"]) == 2
    out, err = capsys.readouterr()
    assert sorted(calls) == [1, 2, 3] and "seed 2  the GPU is on fire" in out
    assert err.strip() == "holdfast train: seed 2: the GPU is on fire"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_seeds_say_what_was_done_and_how_to_continue(tmp_path: Path, number: signal.Signals, code: int):
    flags = [*FLAGS, "--total-steps", "100000000", "--seeds", "1", "2", "3"]
    flags.remove("--quiet")
    with subprocess.Popen(
        [sys.executable, "-c", ONE_AT_A_TIME, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=tmp_path, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        header, progress = process.stdout.readline(), process.stdout.readline()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert header == "3 seeds, 1 at a time, in runs/TMaze-v0\n"
    assert re.match(r"seed 1  update +\d+/3125000 .* return ", progress), progress
    run, lines = tmp_path / "runs/TMaze-v0/lstm-h8-length3-seed1", out.splitlines()
    done = len(read_progress(run))
    command = "continue with   holdfast train --resume runs/TMaze-v0/lstm-h8-length3-seed1"
    assert lines[-3] == f"seed 1  update {done} of 3125000; {command}"
    assert lines[-2:] == ["seed 2  nothing is saved", "seed 3  nothing is saved"]
    assert checkpoint.find(run).name == f"update_{done:08d}.pt"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seeds", "1", "1"], "names a seed twice"),
        (["--seeds", "1", "2"], "leave out torchrun"),
        (["--seeds", "1", "2", "--seed", "3"], "--seed and --seeds cannot be combined; name all seeds with --seeds"),
        (["--seed=3", "--seeds", "1"], "--seed and --seeds cannot be combined; name all seeds with --seeds"),
    ],
)
def test_seeds_that_cannot_be_trained_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, flags: list[str], words: str
):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    assert main([*FLAGS, *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists(), "a refused command leaves nothing behind"


def test_seeds_whose_folder_cannot_be_made_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("a file")
    assert main([*FLAGS, "--seeds", "1", "2"]) == 2
    assert capsys.readouterr().err == "holdfast train: runs/TMaze-v0: Not a directory\n"
