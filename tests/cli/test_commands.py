import json
import os
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest

from holdfast.cli import commands as cli
from holdfast.cli import flags as cli_flags
from holdfast.config import PRESETS
from holdfast.runs.log import read_progress

TINY = ["--hidden-size", 8, "--num-envs", 4, "--num-steps", 8, "--minibatches", 2, "--epochs", 1, "--threads", 1]
TINY += ["--final-eval-episodes", 2, "--no-tensorboard"]


class Gridless(gym.Env):
    """Ten steps of reward 1; draws a grey square."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 10, False, {}

    def render(self):
        return np.full((8, 8, 3), 20 * self.t, np.uint8)


if "TenSteps-v0" not in gym.registry:
    gym.register("TenSteps-v0", Gridless)


@pytest.fixture
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*argv):
    """Exit code of a command, whether it returns it or exits."""
    try:
        return cli.main([str(argument) for argument in argv])
    except SystemExit as end:
        return end.code or 0


def train(*more, steps=64):
    assert run("train", *TINY, "--total-steps", steps, *more) == 0


def test_help_names_every_command(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert run(*argv) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {command} " in text for command in cli.COMMANDS)


@pytest.mark.parametrize("command", ["train", "eval", "plot", "envs", "doctor", "info"])
def test_every_command_has_help(command, capsys):
    assert run(command, "--help") == 0
    assert f"usage: holdfast {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("trian", "no command 'trian'; did you mean train?"),
        ("train --hiden-size 3", "Unrecognized options: --hiden-size, 3; did you mean --hidden-size?"),
        ("train --core rnn", "invalid choice 'rnn' for argument '--core'"),
        ("train --hidden-size big", "--hidden-size: 'big' is not an integer"),
        ("train --gamma big", "--gamma: 'big' is not a number"),
        ("train --bptt 7", "bptt=7 must divide num_steps=64"),
        ("train --preset nothing", "unknown preset 'nothing'; one of repeat-previous-easy"),
        ("train --preset t-maze --resume runs/x", "--preset and --resume exclude each other"),
        ("train --resume runs/x --seeds 1 2", "--resume goes on with one run"),
        ("train --seeds 1 2 --run-dir x", "--run-dir is one folder"),
        ("train --resume nowhere", "nowhere: there is no such file or run folder"),
        ("train --config nowhere.json", "nowhere.json: there is no such file"),
        ("train --env CartPoll-v1", "no environment 'CartPoll-v1'; did you mean CartPole-v1"),
        ("train --env-args length", "expected name=value"),
        ("train --env holdfast/TMaze-v0 --env-args size=4", "unexpected keyword argument 'size'"),
        ("train --device cuda:x", "Invalid device string"),
        ("eval", "missing: A run folder"),
        ("eval nowhere", "nowhere: there is no such file or run folder"),
        ("plot nowhere", "nowhere is not a run folder"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(argv, words, there, capsys):
    assert run(*argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("holdfast")
    assert words in err


@pytest.mark.parametrize(
    "complaint",
    [
        """╭─ Unrecognized options ─────────────────╮
           │ Unrecognized options: --hiden-size, 3  │
           │ ────────────────────────────────────── │
           │ Perhaps you meant:                     │
           │     --hidden-size INT                  │
           ╰────────────────────────────────────────╯""",
        """ Unrecognized options
            -----------------------------------------
             Unrecognized options: --hiden-size, 3
             -----------------------------------------
             Perhaps you meant:
                 --hidden-size INT
            """,
    ],
    ids=["terminal", "plain"],
)
def test_complaints_in_boxes_become_one_line(complaint):
    expected = "Unrecognized options: --hiden-size, 3; did you mean --hidden-size?"
    assert cli_flags.one_line(complaint, "train") == expected


def test_train_ends_with_result_folder_plot_and_next_steps(there, capsys):
    train(steps=512)  # 128 steps of each environment: episodes have ended
    out = capsys.readouterr().out
    folder = there / "runs/RepeatPreviousEasy-v0/lstm-seed1"
    assert "over 2 fresh episodes" in out and "steps/s" in out
    for line in (
        "run       runs/RepeatPreviousEasy-v0/lstm-seed1",
        "curve     runs/RepeatPreviousEasy-v0/lstm-seed1/curve.png",
        "holdfast eval runs/RepeatPreviousEasy-v0/lstm-seed1",
        "holdfast plot runs/RepeatPreviousEasy-v0/* -o curves.png",
        "holdfast train --resume runs/RepeatPreviousEasy-v0/lstm-seed1 --total-steps 1024",
    ):
        assert line in out
    assert (folder / "curve.png").exists() and (folder / "meta.json").exists()
    assert len(read_progress(folder)) == 16


def test_quiet_prints_the_result_only(there, capsys):
    train("--quiet")
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.startswith("return ")


def test_a_preset_gives_defaults_and_flags_override_them(there, capsys):
    train("--preset", "t-maze", "--quiet", "--env-args", "length=5")
    config = json.loads((there / "runs/TMaze-v0/lstm-seed1/config.json").read_text())
    assert config["env"] == "holdfast/TMaze-v0" and config["entropy_coef"] == PRESETS["t-maze"]["entropy_coef"]
    assert config["hidden_size"] == 8 and config["env_kwargs"] == {"length": 5}


def test_a_run_folder_is_never_overwritten(there, capsys):
    for _ in range(3):
        train("--quiet")
    names = sorted(path.name for path in (there / "runs/RepeatPreviousEasy-v0").iterdir())
    assert names == ["lstm-seed1", "lstm-seed1-2", "lstm-seed1-3"]
    assert run("train", *TINY, "--name", "lstm-seed1", "--total-steps", 64) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_config_reruns_a_run_exactly(there, capsys):
    train("--quiet", "--run-dir", "first", "--gamma", "0.9")
    assert run("train", "--config", "first/config.json", "--run-dir", "second") == 0
    first, second = (read_progress(there / name) for name in ("first", "second"))
    assert _without_time(first) == _without_time(second)
    assert json.loads((there / "second/config.json").read_text())["gamma"] == 0.9


def _without_time(rows):
    return [{name: text for name, text in row.items() if not name.startswith("time/")} for row in rows]


def test_a_run_goes_on_where_it_is_now_with_more_steps(there, capsys):
    train("--quiet", "--run-dir", "whole", "--lr-schedule", "constant", steps=128)
    train("--quiet", "--run-dir", "part", "--lr-schedule", "constant")
    os.rename(there / "part", there / "moved")
    assert run("train", "--resume", "moved", "--total-steps", 128, "--quiet") == 0
    assert not (there / "part").exists()
    assert _without_time(read_progress(there / "moved")) == _without_time(read_progress(there / "whole"))
    assert run("train", "--resume", "moved", "--hidden-size", 16) == 2
    assert "--hidden-size cannot change" in capsys.readouterr().err


def test_seeds_make_a_run_each_and_one_plot(there, capsys):
    train("--seeds", 1, 2, "--quiet", steps=512)
    folder = there / "runs/RepeatPreviousEasy-v0"
    assert sorted(path.name for path in folder.iterdir()) == ["lstm-seed1", "lstm-seed2", "seeds.png"]
    configs = [json.loads((folder / f"lstm-seed{seed}/config.json").read_text()) for seed in (1, 2)]
    assert [config["seed"] for config in configs] == [1, 2]


def test_eval_reports_mean_error_and_lengths_and_is_repeatable(there, capsys):
    train("--quiet", "--run-dir", "run")
    capsys.readouterr()
    reports = []
    for _ in range(2):
        assert run("eval", "run", "--episodes", 6, "--deterministic") == 0
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1]
    assert "length  51.0 (mean), 51 to 51" in reports[0]
    assert "6 episodes, most likely actions, seed 0" in reports[0]
    (checkpoint,) = (there / "run/checkpoints").glob("*.pt")
    assert run("eval", checkpoint, "--episodes", 1) == 0


def test_a_checkpoint_of_something_else_and_a_damaged_one_are_mistakes(there, capsys):
    from holdfast.runs import checkpoint

    checkpoint.save(there / "other.pt", {"weights": [1.0]})
    train("--quiet", "--run-dir", "run")
    (file,) = (there / "run/checkpoints").glob("*.pt")
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    for command in ("eval", "train --resume"):
        assert run(*command.split(), "other.pt") == 2
        assert "no trainer wrote this checkpoint" in capsys.readouterr().err
        assert run(*command.split(), "run") == 2
        assert "damaged or cut short" in capsys.readouterr().err


def test_video_draws_episodes_of_an_environment_that_renders(there, capsys):
    from PIL import Image

    train("--quiet", "--run-dir", "run", "--env", "TenSteps-v0")
    assert run("eval", "run", "--episodes", 2, "--video", "films") == 0
    assert "films/episode_2.gif" in capsys.readouterr().out
    with Image.open(there / "films/episode_1.gif") as film:
        assert film.n_frames == 10


def test_video_of_an_environment_that_does_not_render_is_a_mistake(there, capsys):
    train("--quiet", "--run-dir", "run")
    assert run("eval", "run", "--episodes", 1, "--video", "films") == 2
    assert "has nothing to render" in capsys.readouterr().err


def test_plot_takes_run_folders_and_folders_of_runs(there, capsys):
    train("--seeds", 1, 2, "--quiet", steps=512)
    for argv in (["runs"], list((there / "runs/RepeatPreviousEasy-v0").iterdir())):
        assert run("plot", *argv, "-o", "new.png") == 0
        (there / "new.png").unlink()
    capsys.readouterr()
    assert run("plot", "runs", "--metric", "loss") == 2
    assert "no metric 'loss'" in capsys.readouterr().err


def test_doctor_examines_a_run(there, capsys):
    train("--quiet", "--run-dir", "run")
    capsys.readouterr()
    assert run("doctor", "run:run", "--quiet", "--json", "report.json") == 0
    assert (there / "report.json").exists() and capsys.readouterr().out.count("\n") == 1
    assert run("doctor", "run:nowhere") == 2


def test_envs_lists_ours_and_the_presets(capsys):
    assert run("envs") == 0
    out = capsys.readouterr().out
    assert "holdfast/TMaze-v0" in out and "popgym:" in out
    assert all(preset in out for preset in PRESETS)


def test_info_prints_versions(capsys):
    assert run("info") == 0
    out = capsys.readouterr().out
    assert "\ntorch " in out and "\ncpu kernel " in out


def test_a_replay_error_is_a_message_and_no_traceback(there, capsys, monkeypatch):
    from holdfast.training import replay_check

    def fail(*arguments, **options):
        raise replay_check.ReplayError("the training leg differs\nat t = 3")

    monkeypatch.setattr(replay_check, "check", fail)
    assert run("train", *TINY, "--total-steps", 64, "--quiet") == 2
    assert capsys.readouterr().err == "holdfast train: the training leg differs at t = 3\n"


def test_ctrl_c_saves_and_says_how_to_go_on(there):
    argv = [
        sys.executable,
        "-m",
        "holdfast",
        "train",
        *map(str, TINY),
        "--total-steps",
        "100000000",
        "--run-dir",
        "run",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not read_progress(there / "run") and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "go on with   holdfast train --resume run" in out
    assert len(list((there / "run/checkpoints").glob("update_*.pt"))) == 1
