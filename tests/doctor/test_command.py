"""`holdfast doctor`: targets, exit codes and files."""

import json
import sys

import pytest

from broken.sb3_models import shipped
from holdfast.cli.doctor import find, main

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


def test_exit_codes(package, capsys):
    assert main("somebodys_policy:make_healthy") == 0
    assert "is healthy" in capsys.readouterr().out
    assert main("somebodys_policy:layer", quiet=True) == 0
    assert main("somebodys_policy:make_sick") == 1
    assert "reset-dropped-in-training" in capsys.readouterr().out
    assert main("somebodys_policy:make_broken") == 2
    assert "out of order" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing_here:make", "nothing_here"),
        ("somebodys_policy:absent", "absent"),
        ("somebodys_policy:number", "int"),
        ("somebodys_policy", "package.module:factory"),
        ("sb3:absent.zip", "absent.zip"),
        ("run:absent", "absent"),
    ],
)
def test_what_cannot_be_examined_exits_with_two(package, capsys, target, says):
    assert main(target) == 2
    assert says in capsys.readouterr().err


def test_files_are_written(package, capsys):
    assert main("somebodys_policy:make_sick", html="r.html", json="r.json", png="r.png", quiet=True) == 1
    assert json.loads((package / "r.json").read_text())["ok"] is False
    assert (package / "r.html").read_text().startswith("<!doctype html>")
    assert (package / "r.png").read_bytes().startswith(b"\x89PNG")


def test_json_to_standard_output_is_json_alone(package, capsys):
    main("somebodys_policy:make_sick", json="-")
    assert json.loads(capsys.readouterr().out)["findings"]


def test_an_sb3_model_from_its_zip(tmp_path, capsys):
    shipped().save(tmp_path / "model.zip")
    assert main(f"sb3:{tmp_path / 'model.zip'}", quiet=True) == 0


def test_a_holdfast_run(tmp_path, capsys):
    import holdfast as hf

    config = hf.TrainConfig(
        env="holdfast/RepeatFirstEasy-v0",
        hidden_size=16,
        num_envs=4,
        total_steps=256,
        seed=1,
        device="cpu",
        run_dir=str(tmp_path / "run"),
        quiet=True,
    )
    hf.Trainer(config).run()
    assert main(f"run:{tmp_path / 'run'}", quiet=True) == 0


def test_find_follows_dots(package):
    assert find("somebodys_policy:layer").hidden_size == 16
