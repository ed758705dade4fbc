"""`holdfast sweep`: the whole command on tiny trainings."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli import sweep as sweep_command
from holdfast.runs.log import read_progress
from holdfast.sweep.trial_run import _Watch

pytest.importorskip("optuna")

FLAGS = str.split(
    "--env holdfast/TMaze-v0 --env-args length=3 --hidden-size 4 --num-envs 4 --num-steps 8 --minibatches 2 --epochs 1 "
    "--total-steps 256 --device cpu --threads 1"
)
STUDY = Path("runs/sweeps/TMaze-v0")


def outcomes(folder: Path, trials: int) -> list[Any]:
    from holdfast.sweep.space import read_space
    from holdfast.sweep.study import Study

    space = read_space(folder / "space.json", hf.PPOConfig)
    return Study(f"sqlite:///{folder / STUDY / 'study.db'}", "TMaze-v0", space, {}, 1, trials).outcomes()


def test_a_sweep_writes_the_best_settings_as_a_preset_and_draws_its_trials(run: Any, folder: Path, capsys: Any):
    assert run("sweep", *FLAGS, "--trials", 4, "--workers", 1, "--confirm", 1, "--no-prune") == 0
    said = capsys.readouterr().out
    assert "trial 0 is the preset t-maze" in said and "4 complete" in said and "on fresh seeds" in said
    best = json.loads((STUDY / "best.json").read_text())
    assert best["env"] == "holdfast/TMaze-v0" and best["env_kwargs"] == {"length": 3} and "run_dir" not in best
    for name in ("parallel.png", "importance.png"):
        assert (STUDY / name).read_bytes().startswith(b"\x89PNG")
    first = json.loads((STUDY / "trials/0000/config.json").read_text())
    assert (first["learning_rate"], first["gamma"], first["memory_span"]) == (2e-3, 0.99, 60)  # the preset's
    if find_spec("tensorboard"):
        assert list((STUDY / "trials/0000").glob("events.out.tfevents.*")), "as in any run"
    finals = sorted(path.name for path in (STUDY / "trials").iterdir() if "seed" in path.name)
    assert len(finals) == 3 and finals[0] == "0000-seed1001"

    assert run("train", "--preset", STUDY / "best.json", "--quiet", "--final-eval-episodes", 1, "--name", "it") == 0
    trained = json.loads(Path("runs/TMaze-v0/it/config.json").read_text())
    assert {name: trained[name] for name in best} == best

    before = (STUDY / "study.db").stat().st_size
    assert (
        run("sweep", *FLAGS, "--trials", 4, "--workers", 1, "--confirm", 1, "--no-prune") == 0
    )  # nothing is left to do
    assert (STUDY / "study.db").stat().st_size == before


def test_a_sweep_of_two_processes_that_is_killed_goes_on_where_it_was_and_loses_no_trial(
    run: Any, folder: Path, capsys: Any
):
    more = ["--trials", "4", "--confirm", "0", "--no-prune", "--checkpoint-every", "2", "--total-steps", "4096"]
    (folder / "space.json").write_text(json.dumps({"learning_rate": {"low": 1e-3, "high": 1e-2, "scale": "log"}}))
    command = ["sweep", *FLAGS, *more, "--space", "space.json", "--workers"]
    child = subprocess.Popen([sys.executable, "-m", "holdfast", *command, "2"], stdout=subprocess.DEVNULL)
    trials = [folder / STUDY / f"trials/000{number}" for number in (0, 1)]
    until = time.monotonic() + 120
    while not all(list(trial.glob("checkpoints/update_*.pt")) for trial in trials) and time.monotonic() < until:
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)  # the other process notices, saves, and ends
    child.wait()
    assert run(*command, "1") == 0
    assert "4 complete" in capsys.readouterr().out
    assert len({outcome.index for outcome in outcomes(folder, 4)}) == len(outcomes(folder, 4)) == 4
    for trial in trials:
        assert [int(row["update"]) for row in read_progress(trial)] == list(range(1, 129))
    assert not any(path.name.endswith("-again") for path in (folder / STUDY / "trials").iterdir())


def test_sigterm_to_a_sweep_ends_all_its_processes_and_puts_their_trials_back(folder: Path):
    flags = [*FLAGS, "--total-steps", "100000000", "--trials", "4", "--workers", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast", "sweep", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as command:  # fmt: skip
        trials = [folder / STUDY / f"trials/000{number}" for number in (0, 1)]
        until = time.monotonic() + 120
        while not all(read_progress(trial) for trial in trials):
            assert command.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        command.send_signal(signal.SIGTERM)
        out, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (143, "")
    assert out.splitlines()[-1].startswith("continue with   holdfast sweep --env")
    with pytest.raises(ProcessLookupError):
        os.killpg(command.pid, 0)  # nobody is left in its group
    assert all(list(trial.glob("checkpoints/update_*.pt")) for trial in trials)
    with sqlite3.connect(STUDY / "study.db") as database:
        states = database.execute("select state from trials order by trial_id").fetchall()
    database.close()
    assert states.count(("RUNNING",)) == 0 and states.count(("WAITING",)) == 2


def test_a_study_that_begins_again_trains_its_own_settings(run: Any, folder: Path, capsys: Any):
    flags = [*FLAGS, "--trials", 1, "--workers", 1, "--confirm", 0]
    assert run("sweep", *flags, "--learning-rate", 1e-3) == 0
    (STUDY / "study.db").unlink()
    (STUDY / "space.json").unlink()
    assert run("sweep", *flags, "--learning-rate", 0.05) == 0
    rates = {
        path.parent.name: json.loads(path.read_text())["learning_rate"] for path in STUDY.glob("trials/*/config.json")
    }
    assert rates == {"0000": 1e-3, "0000-again": 0.05}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"core": {"choices": ["gru"]}}, "learning_rate {'low': 0.001, 'high': 0.01, 'scale': 'log'}, now missing"),
        ({"learning_rate": {"low": 1e-3, "high": 1e-2}}, "now {'low': 0.001, 'high': 0.01, 'scale': 'linear'}"),
        (
            {"learning_rate": {"low": 1e-3, "high": 1e-2, "scale": "log"}, "epochs": {"choices": [1]}},
            "epochs missing, now",
        ),
    ],
)
def test_a_study_whose_space_was_edited_is_refused_before_anything_trains(
    changed: dict[str, Any], says: str, run: Any, folder: Path, capsys: Any
):
    flags = [*FLAGS, "--workers", 1, "--confirm", 0]
    STUDY.mkdir(parents=True)
    (STUDY / "space.json").write_text(json.dumps({"learning_rate": {"low": 1e-3, "high": 1e-2, "scale": "log"}}))
    assert run("sweep", *flags, "--trials", 1) == 0
    best = (STUDY / "best.json").read_bytes()
    (STUDY / "space.json").write_text(json.dumps(changed))
    capsys.readouterr()
    assert run("sweep", *flags, "--trials", 2) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the space of the study 'TMaze-v0' changed" in line and says in line
    assert line.endswith("or start a new study: --study NAME")
    assert (STUDY / "best.json").read_bytes() == best and len(list((STUDY / "trials").iterdir())) == 1


def test_a_time_limit_ends_a_sweep_with_what_it_has(run: Any, folder: Path, capsys: Any):
    flags = [*FLAGS, "--trials", "500", "--workers", "1", "--confirm", "0", "--time", "4s"]
    assert run("sweep", *flags) == 0
    said = capsys.readouterr().out
    assert "the time is over; continue with   holdfast sweep --env holdfast/TMaze-v0" in said
    assert (STUDY / "best.json").exists()


@pytest.mark.parametrize(("flags", "preset"), [([], "cartpole"), (["--mask-velocity"], "cartpole-masked")])
def test_a_sweep_begins_with_the_preset_of_the_task_as_it_is_played(
    flags: list[str], preset: str, run: Any, tiny: list[str], folder: Path, capsys: Any
):
    sizes = [flag for flag in tiny if not flag.startswith("--no-")]
    flags = ["--env", "CartPole-v1", *flags, *sizes, "--total-steps", "512", "--trials", "1", "--workers", "1"]
    flags = [flag for flag, before in zip(flags, ["", *flags]) if "--threads" not in (flag, before)]
    assert run("sweep", *flags, "--confirm", "0") == 0
    assert f"; trial 0 is the preset {preset}\n" in capsys.readouterr().out
    trained = json.loads(Path("runs/sweeps/CartPole-v1/trials/0000/config.json").read_text())
    assert trained["threads"] == 1, "of a small network, however many cores the one worker has"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time", "soon"], "--time 'soon': expected a time such as 90s, 30m, 2h or 1d"),
        (["--trials", "0"], "--trials must be at least 1"),
        (["--space", "none.json"], "none.json: there is no such file"),
        (["--trails", "3"], "did you mean --trials?"),
        (["--preset", "t-maze", "--config", "c.json"], "cannot be combined"),
        (["--env", "NoSuchEnv-v9", "--trials", "1", "--workers", "1"], "do not train"),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], message: str, run: Any, folder: Path, capsys: Any):
    assert run("sweep", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_sigterm_says_how_to_go_on_with_the_sweep_and_not_with_a_trial(
    run: Any, folder: Path, capsys: Any, monkeypatch: Any
):
    monkeypatch.setattr(_Watch, "on_update_end", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert run("sweep", *FLAGS, "--trials", 1, "--workers", 1) == 143
    said = capsys.readouterr()
    assert "continue with   holdfast sweep --env" in said.out + said.err and "--resume" not in said.out + said.err


def test_the_space_is_written_for_editing(run: Any, folder: Path, capsys: Any):
    assert run("sweep", *FLAGS, "--write-space") == 0
    assert capsys.readouterr().out.strip() == str(STUDY / "space.json")
    assert "learning_rate" in json.loads((STUDY / "space.json").read_text())
    assert not (STUDY / "study.db").exists()


def test_a_space_that_cannot_include_the_start_is_refused_before_anything_trains(run: Any, folder: Path, capsys: Any):
    (folder / "space.json").write_text(json.dumps({"entropy_coef": {"low": 1e-3, "high": 1e-2, "scale": "log"}}))
    assert run("sweep", *FLAGS, "--space", "space.json", "--entropy-coef", 0, "--trials", 2, "--workers", 1) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "entropy_coef has a range with the scale log in the search space, and the sweep starts from 0" in line
    assert not (folder / STUDY).exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "1000000"], "--workers must be between 0 and 1024"),
        (["--confirm", "-1"], "--confirm must be between 0 and 1000"),
        (["--study", "../../elsewhere"], "leaves the folder runs/sweeps"),
        (["--preset", ""], "the value is empty"),
    ],
)
def test_a_sweep_that_would_do_harm_is_refused_in_one_line(
    run: Any, folder: Path, capsys: Any, flags: list[str], said: str
):
    assert run("sweep", *FLAGS, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and list(folder.iterdir()) == []


@pytest.mark.parametrize("storage", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused_for_several_workers(run: Any, folder: Path, capsys: Any, storage: str):
    assert run("sweep", *FLAGS, "--storage", storage, "--workers", 2) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--storage {storage} is in the memory of one process, so 2 workers cannot share it" in line


def test_the_command_that_continues_a_sweep_is_shown_without_a_password():
    said = sweep_command._go_on(["--trials", "3", "--storage=postgresql://me:S3cret@host/db"])
    assert "S3cret" not in said and "holdfast sweep --trials 3" in said


@pytest.mark.parametrize(
    "damage",
    [
        "delete from trial_params",
        "update trial_values set value_type = 'x'",
        "update trial_user_attributes set value_json = '['",
    ],
)
def test_a_damaged_study_is_refused_in_one_line(run: Any, folder: Path, capsys: Any, damage: str):
    assert run("sweep", *FLAGS, "--trials", 2, "--workers", 1, "--confirm", 0, "--no-prune") == 0
    with sqlite3.connect(folder / STUDY / "study.db") as database:
        database.execute(damage)
    database.close()
    capsys.readouterr()
    assert run("sweep", *FLAGS, "--trials", 2, "--workers", 1, "--confirm", 0, "--no-prune") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"the study (in runs/sweeps/TMaze-v0|'TMaze-v0') cannot be used", line) or "JSON" in line


def test_what_a_database_says_runs_no_command_and_writes_no_escapes(run: Any, folder: Path, capsys: Any):
    import optuna

    short = (*FLAGS, "--workers", 1, "--confirm", 0, "--total-steps", 64)
    assert run("sweep", *short, "--trials", 1) == 0
    study = optuna.load_study(study_name="TMaze-v0", storage=f"sqlite:///{STUDY / 'study.db'}")
    settings = {"env": "subprocess:getoutput", "env_kwargs": {"cmd": "touch owned"}}
    study.enqueue_trial({}, user_attrs={"index": 1, "settings": settings})
    error = {"index": 2, "error": "\x1b]0;owned\x07"}
    study.add_trial(optuna.create_trial(state=optuna.trial.TrialState.FAIL, user_attrs=error))
    capsys.readouterr()
    assert run("sweep", *short, "--trials", 3) == 0
    assert not Path("owned").exists() and not (STUDY / "trials/0001").exists()
    said = "".join(capsys.readouterr())
    assert "the study's database sets 'env', which is not in the search space" in said
    assert "\x1b" not in said and "\x07" not in said and r"\x1b]0;owned\x07" in said


@pytest.mark.parametrize("name", ["study.db.lock", "study.db", "study.db-journal", "trials"])
def test_a_sweep_writes_through_no_link_in_its_folder(name: str, run: Any, folder: Path, capsys: Any):
    STUDY.mkdir(parents=True)
    Path("precious").write_text("kept")
    (STUDY / name).symlink_to(folder / "precious")
    assert run("sweep", *FLAGS, "--workers", 1, "--trials", 1) == 2
    assert f"{name} is a link" in capsys.readouterr().err and Path("precious").read_text() == "kept"


def test_pictures_and_results_of_a_sweep_replace_links(run: Any, folder: Path):
    STUDY.mkdir(parents=True)
    Path("precious").write_text("kept")
    names = ("importance.png", "parallel.png", "best.json")
    for name in names:
        (STUDY / name).symlink_to(folder / "precious")
    assert run("sweep", *FLAGS, "--workers", 1, "--trials", 4, "--confirm", 0, "--no-prune", "--total-steps", 64) == 0
    assert Path("precious").read_text() == "kept"
    assert all((STUDY / name).is_file() and not (STUDY / name).is_symlink() for name in names)
