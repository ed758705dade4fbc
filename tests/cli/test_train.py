import json
import os
import signal
import subprocess
import sys
import time

from holdfast.config import PRESETS
from holdfast.runs.log import read_progress


def test_train_ends_with_result_folder_plot_and_next_steps(train, folder, capsys):
    train(steps=512)  # 128 steps of each environment: episodes have ended
    out = capsys.readouterr().out
    run_folder = folder / "runs/RepeatPreviousEasy-v0/lstm-seed1"
    assert "over 2 fresh episodes" in out and "steps/s" in out
    for line in (
        "run       runs/RepeatPreviousEasy-v0/lstm-seed1",
        "curve     runs/RepeatPreviousEasy-v0/lstm-seed1/curve.png",
        "holdfast eval runs/RepeatPreviousEasy-v0/lstm-seed1",
        "holdfast plot runs/RepeatPreviousEasy-v0/* -o curves.png",
        "holdfast train --resume runs/RepeatPreviousEasy-v0/lstm-seed1 --total-steps 1024",
    ):
        assert line in out
    assert (run_folder / "curve.png").exists() and (run_folder / "meta.json").exists()
    assert len(read_progress(run_folder)) == 16


def test_quiet_prints_the_result_only(train, folder, capsys):
    train("--quiet")
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.startswith("return ")


def test_a_preset_gives_defaults_and_flags_override_them(train, folder):
    train("--preset", "t-maze", "--quiet", "--env-args", "length=5")
    config = json.loads((folder / "runs/TMaze-v0/lstm-seed1/config.json").read_text())
    assert config["env"] == "holdfast/TMaze-v0" and config["entropy_coef"] == PRESETS["t-maze"]["entropy_coef"]
    assert config["hidden_size"] == 8 and config["env_kwargs"] == {"length": 5}


def test_a_run_folder_is_never_overwritten(run, train, tiny, folder, capsys):
    for _ in range(3):
        train("--quiet")
    names = sorted(path.name for path in (folder / "runs/RepeatPreviousEasy-v0").iterdir())
    assert names == ["lstm-seed1", "lstm-seed1-2", "lstm-seed1-3"]
    assert run("train", *tiny, "--name", "lstm-seed1", "--total-steps", 64) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_config_reruns_a_run_exactly(run, train, folder):
    train("--quiet", "--run-dir", "first", "--gamma", "0.9")
    assert run("train", "--config", "first/config.json", "--run-dir", "second") == 0
    first, second = (read_progress(folder / name) for name in ("first", "second"))
    assert _without_time(first) == _without_time(second)
    assert json.loads((folder / "second/config.json").read_text())["gamma"] == 0.9


def _without_time(rows):
    return [{name: text for name, text in row.items() if not name.startswith("time/")} for row in rows]


def test_a_run_continues_where_it_is_now_with_more_steps(run, train, folder, capsys):
    train("--quiet", "--run-dir", "whole", "--lr-schedule", "constant", steps=128)
    train("--quiet", "--run-dir", "part", "--lr-schedule", "constant")
    os.rename(folder / "part", folder / "moved")
    assert run("train", "--resume", "moved", "--total-steps", 128, "--quiet") == 0
    assert not (folder / "part").exists()
    assert _without_time(read_progress(folder / "moved")) == _without_time(read_progress(folder / "whole"))
    assert run("train", "--resume", "moved", "--hidden-size", 16) == 2
    assert "--hidden-size cannot change" in capsys.readouterr().err


def test_a_resumed_run_keeps_the_arguments_of_its_environment(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run", "--env", "holdfast/TMaze-v0", "--env-args", "length=5")
    assert run("train", "--resume", "run", "--total-steps", 128, "--quiet") == 0
    assert json.loads((folder / "run/config.json").read_text())["env_kwargs"] == {"length": 5}
    assert run("train", "--resume", "run", "--env-args", "length=6") == 2
    assert "--env-kwargs cannot change" in capsys.readouterr().err


def test_a_checkpoint_of_another_program_and_a_damaged_one_are_mistakes(run, train, folder, capsys):
    from holdfast.runs import checkpoint

    checkpoint.save(folder / "other.pt", {"weights": [1.0]})
    train("--quiet", "--run-dir", "run")
    (file,) = (folder / "run/checkpoints").glob("*.pt")
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    for command in ("eval", "train --resume"):
        assert run(*command.split(), "other.pt") == 2
        assert "it has no collector, config, own_policy, policy" in capsys.readouterr().err
        assert run(*command.split(), "run") == 2
        assert "damaged or cut short" in capsys.readouterr().err


def test_a_replay_error_is_a_message_and_no_traceback(run, tiny, folder, capsys, monkeypatch):
    from holdfast.training import replay_check

    def fail(*arguments, **options):
        raise replay_check.ReplayError("the training leg differs\nat t = 3")

    monkeypatch.setattr(replay_check, "check", fail)
    assert run("train", *tiny, "--total-steps", 64, "--quiet") == 2
    assert capsys.readouterr().err == "holdfast train: the training leg differs at t = 3\n"


def test_ctrl_c_saves_and_says_how_to_continue(tiny, folder):
    argv = [sys.executable, "-m", "holdfast", "train", *tiny, "--total-steps", "100000000", "--run-dir", "run"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not read_progress(folder / "run") and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "continue with   holdfast train --resume run" in out
    assert len(list((folder / "run/checkpoints").glob("update_*.pt"))) == 1
