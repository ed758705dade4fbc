"""`holdfast doctor`: targets, exit codes and files."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from holdfast.cli.doctor import find
from holdfast.doctor import Report

MODULE = """
import torch
from torch import nn
from holdfast.doctor.subjects import Module

def make_healthy():
    torch.manual_seed(0)
    return nn.LSTM(4, 16)

def make_sick():
    torch.manual_seed(0)
    return Module(nn.LSTM(4, 16), resets="nobody")

def make_broken():
    def broken(x, state):
        raise RuntimeError("out of order")
    return Module(broken, input_size=4)

def make_unseeded():
    return Module(nn.LSTM(4, 16), resets="nobody")

class TakesSpaces(nn.Module):
    def __init__(self, observation_space, action_space, config=None):
        super().__init__()

class TakesSize(nn.Module):
    def __init__(self, size):
        super().__init__()

def boom():
    raise RuntimeError("out of order")

class NanStays(nn.Module):  # multiplies by zero
    input_size = 4

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 8)

    def forward(self, x, state, resets):
        h = x.new_zeros(x.shape[1], 8) if state is None else state
        outputs = []
        for x_t, first in zip(x, resets):
            h = self.cell(x_t, h * (~first).float()[:, None])
            outputs.append(h)
        return torch.stack(outputs), h

def make_warned():
    torch.manual_seed(0)
    return NanStays()

layer = make_healthy()
number = 3
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "somebodys_policy.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("somebodys_policy", None)


def test_exit_codes(run, package, capsys):
    assert run("doctor", "somebodys_policy:make_healthy") == 0
    assert "is healthy" in capsys.readouterr().out
    assert run("doctor", "somebodys_policy:layer", "--quiet") == 0
    assert run("doctor", "somebodys_policy:make_sick") == 1
    assert "reset-dropped-in-training" in capsys.readouterr().out
    assert run("doctor", "somebodys_policy:make_broken") == 2
    assert "out of order" in capsys.readouterr().err


def test_a_warning_fails_if_strict_and_an_ignored_cause_never_does(run, package, capsys):
    for flags, code in (("", 0), ("--strict", 1), ("--strict --ignore nan-survives", 0)):
        assert run("doctor", "somebodys_policy:make_warned", *flags.split()) == code
        assert "nan-survives" in capsys.readouterr().out
    assert run("doctor", "somebodys_policy:make_sick", "--ignore", "reset-dropped-in-training") == 0
    assert run("doctor", "somebodys_policy:make_sick", "--ignore", "no-such-cause") == 2
    assert "there is no cause no-such-cause" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing_here:make", "could not examine nothing_here:make: policy 'nothing_here:make': there is no module"),
        ("somebodys_policy:absent", "somebodys_policy has no absent\n"),
        ("somebodys_policy:make_helthy", "somebodys_policy has no make_helthy; did you mean make_healthy?\n"),
        ("somebodys_policy.py:healthy", "somebodys_policy.py is a file; name its module, somebodys_policy\n"),
        ("somebodys_policy:number", "int"),
        ("somebodys_policy", "package.module:factory"),
        ("sb3:absent.zip", "absent.zip"),
        ("run:absent", "absent"),
        (
            "runs/absent",
            "could not examine runs/absent: there is no runs/absent; expected a run folder, package.module:factory or sb3:model.zip\n",
        ),
    ],
)
def test_what_cannot_be_examined_exits_with_two(run, package, capsys, target, says):
    assert run("doctor", target) == 2
    assert says in capsys.readouterr().err


def test_the_name_of_a_factory_does_not_become_a_picture(run, package, capsys):
    assert run("doctor", "somebodys_policy:boom") == 2
    assert capsys.readouterr().err == "could not examine somebodys_policy:boom: RuntimeError: out of order\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--bptt -1", "--bptt must be at least 1, got -1"),
        ("--bptt 0", "--bptt must be at least 1, got 0"),
        ("--tolerance -0.1", "--tolerance must be a finite number of at least 0, got -0.1"),
        ("--tolerance nan", "--tolerance must be a finite number of at least 0, got nan"),
    ],
)
def test_a_number_that_means_nothing_is_refused(run, package, capsys, flags, says):
    assert run("doctor", "somebodys_policy:make_healthy", *flags.split()) == 2
    assert capsys.readouterr() == ("", f"holdfast doctor: {says}\n")


FACTORY = "name a function without arguments that makes the policy, such as def make(): return"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "somebodys_policy:TakesSpaces",
            f"TakesSpaces takes observation_space, action_space; {FACTORY} TakesSpaces(...), or train for a moment and "
            "examine the run: holdfast train --env ENV --policy somebodys_policy:TakesSpaces --total-steps 1000, "
            "then holdfast doctor RUN\n",
        ),
        ("somebodys_policy:TakesSize", f"TakesSize takes size; {FACTORY} TakesSize(...)\n"),
    ],
)
def test_a_class_that_takes_arguments_is_told_how_it_can_be_examined(run, package, capsys, target, says):
    assert run("doctor", target) == 2
    assert capsys.readouterr().err == f"could not examine {target}: {says}"


def test_files_are_written(run, package, capsys):
    files = ["--html", "r.html", "--json", "r.json", "--png", "r.png"]
    assert run("doctor", "somebodys_policy:make_sick", *files, "--quiet") == 1
    assert json.loads((package / "r.json").read_text())["ok"] is False
    assert (package / "r.html").read_text().startswith("<!doctype html>")
    assert (package / "r.png").read_bytes().startswith(b"\x89PNG")


def test_missing_folders_are_made_and_the_files_are_named(run, package, capsys):
    files = ["--html", "new/a/r.html", "--sarif", "new/b/r.sarif", "--junit", "r.xml"]
    assert run("doctor", "somebodys_policy:make_sick", *files) == 1
    assert capsys.readouterr().err == "written: new/a/r.html, new/b/r.sarif, r.xml\n"
    assert all((package / name).is_file() for name in files[1::2])


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("somebodys_policy.py/r.html", "somebodys_policy.py is a file, not a folder; choose another place"),
        ("folder", "this is a folder; name a file in it"),
        ("locked/new/r.html", "locked cannot be written; choose another place"),
        ("locked.html", "locked.html cannot be written; choose another place"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_examination(
    run, package, capsys, monkeypatch, place, says
):
    (package / "folder").mkdir()
    (package / "locked").mkdir()
    (package / "locked.html").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).name.startswith("locked"))
    assert run("doctor", "nothing_here:make", "--html", place) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"holdfast doctor: --html {place}: ") and err.endswith(f"{says}\n")
    assert not (package / "locked/new").exists()


def test_a_picture_without_matplotlib_is_refused_before_the_examination(run, package, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("doctor", "nothing_here:make", "--png", "r.png") == 2
    assert capsys.readouterr() == ("", "holdfast doctor: --png needs matplotlib: pip install 'holdfast[plot]'\n")


def test_a_disk_that_is_full_after_the_examination_costs_one_file_and_not_the_report(run, package, capsys, monkeypatch):
    def full(report, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Report, "to_html", full)
    files = ["--html", "r.html", "--junit", "r.xml"]
    assert run("doctor", "somebodys_policy:make_healthy", "--quiet", *files) == 2
    out, err = capsys.readouterr()
    assert "is healthy" in out and err == "holdfast doctor: r.html: No space left on device\n"
    assert (package / "r.xml").exists()
    assert run("doctor", "somebodys_policy:make_sick", "--quiet", *files) == 1


@pytest.mark.parametrize("form", ["text", "github"])
def test_a_reader_that_leaves_early_loses_neither_files_nor_the_exit_code(package, form):
    command = [sys.executable, "-m", "holdfast", "doctor", "somebodys_policy:make_sick", "--format", form]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*command, "--html", "r.html"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "written: r.html\n")
    assert (package / "r.html").exists()


def test_json_to_standard_output_is_json_alone(run, package, capsys):
    run("doctor", "somebodys_policy:make_sick", "--json", "-")
    assert json.loads(capsys.readouterr().out)["findings"]


def test_a_run_folder_is_a_target_as_in_other_commands(run, train, folder, capsys):
    train("--quiet", "--run-dir", "runs/x")
    (checkpoint,) = (folder / "runs/x/checkpoints").iterdir()
    capsys.readouterr()
    for target in ("runs/x", "run:runs/x", checkpoint):
        assert run("doctor", target, "--quiet") == 0
        assert "healthy" in capsys.readouterr().out


def test_an_sb3_model_from_its_zip(run, folder, capsys):
    sb3_contrib = pytest.importorskip("sb3_contrib")

    options = {"n_steps": 16, "batch_size": 16, "policy_kwargs": {"lstm_hidden_size": 16, "net_arch": [16]}}
    sb3_contrib.RecurrentPPO("MlpLstmPolicy", gym.make("CartPole-v1"), device="cpu", **options).save("model.zip")
    assert run("doctor", "sb3:model.zip", "--quiet") == 0


def test_doctor_examines_a_run(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run", "--hidden-size", 16, steps=256)
    capsys.readouterr()
    assert run("doctor", "run:run", "--quiet", "--json", "report.json") == 0
    assert (folder / "report.json").exists() and capsys.readouterr().out.count("\n") == 1
    assert run("doctor", "run:nowhere") == 2


def test_find_follows_dots(package):
    assert find("somebodys_policy:layer").hidden_size == 16


def test_the_same_seed_gives_the_same_report_though_the_factory_does_not_seed(run, package, capsys):
    def report(seed):
        run("doctor", "somebodys_policy:make_unseeded", "--json", "-", "--seed", seed)
        return json.loads(capsys.readouterr().out)["findings"]

    first = report("5")
    assert report("5") == first
    assert report("6") != first


def test_the_shape_of_observations_can_be_given(run, package, capsys):
    assert run("doctor", "somebodys_policy:make_healthy", "--quiet", "--obs-shape", "4") == 0
    assert run("doctor", "somebodys_policy:make_healthy", "--quiet", "--obs-shape", "2", "4") == 2
    assert "shown observations of (2, 4)" in capsys.readouterr().err.replace("\n", "")


def test_formats_of_continuous_integration(run, package, capsys):
    files = ["--sarif", "r.sarif", "--junit", "r.xml"]
    assert run("doctor", "somebodys_policy:make_sick", "--format", "github", *files) == 1
    line = 1 + MODULE.splitlines().index("def make_sick():")
    assert capsys.readouterr().out.startswith(f"::error file=somebodys_policy.py,line={line},title=")
    log = json.loads((package / "r.sarif").read_text())
    assert log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] == line
    assert (package / "r.xml").read_text().startswith("<?xml")


@pytest.mark.parametrize("where", ["factory", "policy"])
def test_a_policy_that_calls_exit_does_not_pass(run, folder, capsys, where):
    (folder / "leaves.py").write_text(
        "import sys\nimport holdfast as hf\nimport torch\n\n"
        "class Leaves(hf.RecurrentPolicy):\n"
        "    def __init__(self):\n"
        "        super().__init__(core=hf.GRU(3, 4))\n"
        "    def encode(self, obs):\n        sys.exit(0)\n"
        "    def decode(self, features):\n        return torch.distributions.Categorical(logits=features), features[:, 0]\n\n"
        f"def make():\n    {'sys.exit(0)' if where == 'factory' else 'return Leaves()'}\n"
    )
    code = run("doctor", "leaves:make", "--obs-shape", 3)
    said = capsys.readouterr()
    assert code in (1, 2) and "SystemExit" in said.out + said.err
