"""What README.md and docs/training.md show runs as it stands there, with shorter trainings."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from holdfast.config import PRESETS

ROOT = Path(__file__).parent.parent


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


@pytest.fixture
def short_trainings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    small = {"total_steps": 4096, "num_envs": 16, "hidden_size": 16, "threads": 1, "quiet": True}
    monkeypatch.setitem(PRESETS, "repeat-previous-easy", {**PRESETS["repeat-previous-easy"], **small})
    yield tmp_path
    torch.set_num_threads(before)


def test_the_readme_runs(short_trainings):
    names = {}
    for block in blocks("README.md"):
        exec(block, names)
    assert names["step"].action.shape == (8,)
    assert names["result"].steps == 4096


def test_the_readme_shows_a_policy_and_both_legs_in_under_40_lines_without_state_handling():
    first = blocks("README.md")[0]
    code = re.sub(r"#.*", "", first)
    assert len([line for line in code.splitlines() if line.strip()]) < 40
    for part in ("hf.RecurrentPolicy", "policy.act(", "loss.backward()"):
        assert part in code
    for word in ("detach", "state", "hidden", "zeros", "1 - "):
        assert word not in code


def test_the_commands_of_the_readme_exist():
    from holdfast.cli import commands as cli

    makefile = (ROOT / "Makefile").read_text()
    for block in re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL):
        for first, *rest in filter(None, map(str.split, block.splitlines())):
            if first == "make":
                assert f"\n{rest[0]}:" in makefile
            if first == "holdfast":
                assert rest[0] in cli.COMMANDS


def test_links_lead_somewhere():
    for page in ("README.md", "docs/training.md", "docs/environments.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_training_page_runs(short_trainings):
    names = {}
    for block in blocks("docs/training.md"):
        if "best.pt" in block:
            folder = short_trainings / "runs/TMaze-v0/gru-h64-seed1/checkpoints"
            shutil.copy(next(folder.glob("update_*.pt")), folder / "best.pt")
        exec(block.replace("total_steps=500_000", "total_steps=4096, quiet=True, threads=1"), names)
    assert names["trainer"].update > 0
    assert (short_trainings / "runs/RepeatPreviousEasy-v0/until-solved/progress.csv").exists()


def test_the_training_page_names_every_metric_that_a_run_writes(short_trainings):
    import holdfast as hf
    from holdfast.runs.log import read_progress

    run = hf.Trainer(hf.TrainConfig.preset("repeat-previous-easy")).run().run_dir
    page = (ROOT / "docs/training.md").read_text()
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+)`", page)}
    assert {name.rpartition("/")[2] for name in read_progress(run)[0]} <= named
