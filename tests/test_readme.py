"""What README.md and docs/training.md show runs as it stands there, with shorter trainings."""

import glob
import itertools
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.cli import commands as cli
from holdfast.config import PRESETS
from holdfast.envs.catalog import list_envs

ROOT = Path(__file__).parent.parent


def blocks(page, language="python"):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for kind, text in fenced if kind == language]


@pytest.fixture
def short_trainings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    small = {"total_steps": 4096, "num_envs": 16, "hidden_size": 16, "threads": 1, "quiet": True}
    monkeypatch.setitem(PRESETS, "repeat-previous-easy", {**PRESETS["repeat-previous-easy"], **small})
    yield tmp_path
    torch.set_num_threads(before)


@pytest.fixture
def my_policy(short_trainings, monkeypatch):
    """The README's policy as the file that it says, in the current folder."""
    (short_trainings / "my_policy.py").write_text(blocks("README.md")[0])
    monkeypatch.syspath_prepend(str(short_trainings))
    yield short_trainings
    sys.modules.pop("my_policy", None)


def test_the_readme_runs(my_policy):
    names = {}
    for block in blocks("README.md"):
        alone = {}  # each is a program that can be pasted by itself
        exec(block, alone)
        names |= alone
    assert names["step"].action.shape == (8,)
    assert names["result"].steps == 4096
    assert names["runner"].act(names["policy"].observation_space.sample(), True).action is not None
    assert type(names["hf"].load("my-policy")) is type(names["policy"])


def test_the_readme_shows_a_policy_and_both_legs_in_under_40_lines_without_state_handling():
    code = re.sub(r"#.*", "", "".join(blocks("README.md")[:2]))
    assert len([line for line in code.splitlines() if line.strip()]) < 40
    for part in ("hf.RecurrentPolicy", "policy.act(", "loss.backward()"):
        assert part in code
    for word in ("detach", "state", "hidden", "zeros", "1 - "):
        assert word not in code


def readme_commands():
    lines = [line for block in blocks("README.md", "") for line in block.splitlines() if line]
    return [shlex.split(line, comments=True) for line in lines]


SHORTER = {
    "train": ["--total-steps", "2000", "--num-steps", "16", "--final-eval-episodes", "2", "--name", "{name}"],
    "eval": ["--episodes", "2"],
    "sweep": ["--total-steps", "1000", "--trials", "2", "--workers", "1", "--confirm", "0"],
    "bench": ["--steps", "500", "--seeds", "1", "--cores", "gru", "--tasks", "TMaze", "--jobs", "1"],
}
"""Flags at the end of a command win over those before them."""


def test_every_command_of_the_readme_runs_in_its_order(my_policy, capsys):
    (my_policy / "suite.toml").write_text(blocks("README.md", "toml")[0])
    makefile = (ROOT / "Makefile").read_text()
    ran = []
    for program, *words in readme_commands():
        if program == "make":
            assert f"\n{words[0]}:" in makefile
        if program != "holdfast" or (words[0] == "sweep" and find_spec("optuna") is None):
            continue
        name = f"{'MyPolicy' if '--policy' in words else 'gru-mask-velocity'}-seed1"
        words += [flag.format(name=name) for flag in SHORTER.get(words[0], [])]
        words = [file for word in words for file in (sorted(glob.glob(word)) or [word])]
        assert cli.main(words) == 0, f"{words}: {capsys.readouterr().err}"
        ran.append(words[0])
    assert {*ran, "sweep"} >= {"train", "eval", "plot", "doctor", "sweep", "bench", "export"}
    out = capsys.readouterr().out
    for line in ("task    CartPole-v1, velocities hidden", "memory  gru, 128 units", "policy  my_policy:MyPolicy"):
        assert line in out
    assert "MyPolicy is healthy" in out
    made = ["curves.png", "policy.onnx", "runs/bench/mine/table.md"]
    made += ["runs/sweeps/CartPole-v1/best.json"] if "sweep" in ran else []
    assert all(Path(file).stat().st_size > 0 for file in made)


def test_the_runs_that_the_readme_names_are_those_that_its_commands_make():
    commands = [words for program, *words in readme_commands() if program == "holdfast"]
    trained = [words[1:] for words in commands if words[0] == "train"]
    named = [word for words in commands for word in words if word.startswith("runs/") and "*" not in word]
    folders = {str(_config(words).folder) for words in trained}
    assert named and set(named) <= folders


def _config(words):
    flags = dict(itertools.pairwise(words))
    return hf.TrainConfig(
        env=flags["--env"],
        core=flags.get("--core", "lstm"),
        policy=flags.get("--policy"),
        mask_velocity="--mask-velocity" in words,
        total_steps=int(flags["--total-steps"]),
    )


def test_links_lead_somewhere():
    for page in ("README.md", "docs/training.md", "docs/environments.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_training_page_runs(short_trainings):
    names = {}
    for block in blocks("docs/training.md"):
        if "best.pt" in block:
            folder = short_trainings / "runs/RepeatFirstEasy-v0/gru-seed1/checkpoints"
            shutil.copy(next(folder.glob("update_*.pt")), folder / "best.pt")
        exec(block.replace("total_steps=1_000_000", "total_steps=4096, quiet=True, threads=1"), names)
    assert names["trainer"].update > 0
    assert (short_trainings / "runs/RepeatPreviousEasy-v0/until-solved/progress.csv").exists()


def test_the_training_page_names_every_metric_that_a_run_writes(short_trainings):
    from holdfast.runs.log import read_progress

    run = hf.Trainer(hf.TrainConfig.preset("repeat-previous-easy")).run().run_dir
    page = (ROOT / "docs/training.md").read_text()
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+)`", page)}
    assert {name.rpartition("/")[2] for name in read_progress(run)[0]} <= named


def test_the_readme_counts_the_tasks_that_there_are():
    (count,) = re.findall(r"`holdfast envs` lists (\d+) memory tasks", (ROOT / "README.md").read_text())
    assert int(count) == len(list_envs())
