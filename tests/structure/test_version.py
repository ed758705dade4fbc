"""The version is written in one place, `src/holdfast/__init__.py`, and everything that shows it reads it there."""

from __future__ import annotations

import re

import holdfast as hf
from holdfast.cli import main
from holdfast.runs import checkpoint
from holdfast.runs.metadata import describe_process
from structure.source_tree import PACKAGE, ROOT


def test_the_build_reads_the_version_from_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^dynamic = \["version"\]', project, flags=re.MULTILINE)
    assert re.search(r"^version\s*=", project, flags=re.MULTILINE) is None
    path = re.search(r'\[tool\.hatch\.version\]\npath = "([^"]+)"', project)[1]
    assert ROOT / path == PACKAGE / "__init__.py"
    assert re.findall(r'^__version__ = "([^"]+)"$', (ROOT / path).read_text(), flags=re.MULTILINE) == [hf.__version__]


def test_no_other_source_file_repeats_the_version():
    repeated = [str(file) for file in PACKAGE.rglob("*.py") if f'"{hf.__version__}"' in file.read_text()]
    assert repeated == [str(PACKAGE / "__init__.py")]


def test_the_command_the_metadata_and_a_checkpoint_name_it(tmp_path, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"holdfast {hf.__version__}"
    assert describe_process()["packages"]["holdfast"] == hf.__version__
    trainer = hf.Trainer(
        hf.TrainConfig(hidden_size=4, num_envs=2, num_steps=4, minibatches=1, device="cpu", quiet=True)
    )
    trainer.save(tmp_path / "saved.pt")
    assert checkpoint.load(tmp_path / "saved.pt")["holdfast"] == hf.__version__


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()
