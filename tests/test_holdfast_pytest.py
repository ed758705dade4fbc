"""The pytest plugin, in a project that has a policy file and nothing else."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).parents[1]
POLICY = """
import torch
from torch import nn
from holdfast.doctor.subjects import Module

def healthy():
    return nn.LSTM(4, 8)

def sick():
    return Module(nn.LSTM(4, 8), resets="nobody")

def broken():
    raise RuntimeError("out of order")
"""


def _pytest(folder, *arguments):
    search = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search}
    command = [sys.executable, "-m", "pytest", "-p", "holdfast_pytest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "somebodys.py").write_text(POLICY)
    return tmp_path


def test_without_the_flag_neither_torch_nor_holdfast_is_imported(tmp_path):
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\ndef test_light():\n    assert 'holdfast_pytest' in sys.modules\n"
        "    assert not {'torch', 'holdfast'} & set(sys.modules)\n"
    )
    result = _pytest(tmp_path)
    assert result.returncode == 0, result.stdout


def test_each_check_is_a_test_of_its_own(project):
    result = _pytest(project, "--holdfast-doctor", "somebodys:healthy", "--holdfast-doctor", "somebodys:sick", "-vv")
    assert result.returncode == 1, result.stdout
    assert "holdfast-doctor[somebodys:healthy]::replay PASSED" in result.stdout
    assert "holdfast-doctor[somebodys:sick]::replay FAILED" in result.stdout
    assert "holdfast-doctor[somebodys:sick]::remembers PASSED" in result.stdout
    assert "error: reset-dropped-in-training" in result.stdout
    assert "This follows from reset-dropped-in-training: fix that first." in result.stdout


def test_a_policy_that_cannot_be_examined_fails_once(project):
    result = _pytest(project, "--holdfast-doctor", "somebodys:broken")
    assert result.returncode == 1
    assert "could not examine somebodys:broken: RuntimeError: out of order" in result.stdout
    assert "1 failed" in result.stdout and "passed" not in result.stdout


@pytest.mark.skipif(tomllib is None, reason="tomllib came with Python 3.11")
def test_the_wheel_ships_the_plugin_and_names_it():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["entry-points"]["pytest11"] == {"holdfast_pytest": "holdfast_pytest"}
    assert "src/holdfast_pytest.py" in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_the_installed_package_names_the_plugin():
    try:
        points = distribution("holdfast").entry_points
    except PackageNotFoundError:
        pytest.skip("holdfast is not installed")
    if not any(point.group == "pytest11" for point in points):
        pytest.skip("holdfast was installed before it had a plugin: make test reinstalls it")
    assert [point.value for point in points if point.group == "pytest11"] == ["holdfast_pytest"]
