"""The code in docs/doctor.md runs as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from broken.cleanrl_agents import Agent

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, flags=re.DOTALL)


def _package(folder):
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text("")
    source = "import torch\n\ndef make_policy():\n    torch.manual_seed(0)\n    return torch.nn.LSTM(4, 16)\n"
    (folder / "my_package" / "my_module.py").write_text(source)


def _run(folder, *command):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    names = {"agent": agent, "optimizer": optimizer, "train": lambda: None}
    ran = 0
    for language, code in BLOCKS:
        if language == "python" and "test_memory.py" not in code:
            exec(compile(code, "docs/doctor.md", "exec"), names)
            ran += 1
    assert ran == 4
    assert (tmp_path / "report.html").exists()


def test_pytest_snippet_passes(tmp_path):
    _package(tmp_path)
    (code,) = [code for language, code in BLOCKS if "test_memory.py" in code and language == "python"]
    (tmp_path / "test_memory.py").write_text(code)
    result = _run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_memory.py")
    assert result.returncode == 0, result.stdout + result.stderr


def test_github_actions_snippet_runs(tmp_path):
    _package(tmp_path)
    (code,) = [code for language, code in BLOCKS if language == "yaml"]
    commands = [command for command in re.findall(r"- run: (.*)", code) if not command.startswith("pip ")]
    assert len(commands) == 1
    for command in commands:
        result = _run(tmp_path, "bash", "-ec", command)
        assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "report.html").exists() and (tmp_path / "doctor.sarif").exists()
