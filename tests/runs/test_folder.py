"""The run folder: what it refuses, and where the last checkpoint goes when the disk refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.distributed.ranks import ALONE
from holdfast.runs import checkpoint
from holdfast.runs.folder import RunFolder
from holdfast.runs.log import RunFolderError


def folder(path: Path, said: list[str], refuses: bool = False) -> RunFolder:
    def save(file: Path) -> None:
        if refuses and path in file.parents:
            raise OSError("no space left")
        checkpoint.save(file, {"file": file.name})

    return RunFolder(hf.TrainConfig(run_dir=str(path), keep_checkpoints=2), ALONE, save, said.append)


def test_a_new_run_does_not_take_the_folder_of_another(tmp_path: Path):
    run = folder(tmp_path / "run", [])
    run.prepare({"seed": 1}, {"update": "autograd"}, None)
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["engines"] == {"update": "autograd"}
    assert run.save(1)
    with pytest.raises(FileExistsError, match="already holds a run; resume it"):
        run.prepare({}, {}, None)
    run.prepare({}, {}, 1)  # a resumed run may


def test_a_resumed_run_drops_the_checkpoints_that_it_repeats(tmp_path: Path):
    run = folder(tmp_path / "run", [])
    for update in (1, 2, 3):
        run.save(update)
    assert [p.name for p in checkpoint.rolling(run.path)] == ["update_00000002.pt", "update_00000003.pt"], "kept: 2"
    run.prepare({}, {}, 2)
    assert run.last_checkpoint() == checkpoint.path_for(run.path, 2) and not run.has_checkpoint_of(3)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError, match="cannot be written"):
        folder(tmp_path / "file" / "run", []).prepare({}, {}, None)


def test_a_disk_that_refuses_is_retried_and_at_the_end_the_checkpoint_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "elsewhere"))
    run = folder(tmp_path / "run", said, refuses=True)
    assert not run.save(4) and not run.should_retry(4) and run.should_retry(5)
    assert not run.save_best(4) and run.last_checkpoint() is None
    assert run.should_retry(5), "the best checkpoint has a schedule of its own"
    run.save_at_the_end(6)
    assert run.saved_elsewhere is not None and checkpoint.load(run.saved_elsewhere)["file"].endswith(
        "update_00000006.pt"
    )
    assert len(said) == 3 and "no space left" in said[0] and str(run.saved_elsewhere) in said[2]
