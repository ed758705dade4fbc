"""The run folder: what it refuses, what it moves when a run goes on, and where a checkpoint goes that the disk refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.distributed.ranks import ALONE
from holdfast.runs import checkpoint
from holdfast.runs.folder import FolderInUseError, RunFolder
from holdfast.runs.log import RunFolderError, read_progress

TINY = dict(
    env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=4, num_envs=2, num_steps=8, minibatches=1, epochs=1,
    total_steps=6 * 16, checkpoint_every=2, final_eval_episodes=1, tensorboard=False, quiet=True, device="cpu", threads=1,
)  # fmt: skip


def folder(path: Path, said: list[str], refuses: bool = False, **settings: Any) -> RunFolder:
    def save(file: Path | None) -> None:
        if refuses and file is not None and path in file.parents:
            raise OSError("no space left")
        if file is not None:
            checkpoint.save(file, {"file": file.name})

    return RunFolder(hf.TrainConfig(run_dir=str(path), keep_checkpoints=2, **settings), ALONE, save, said.append)


def train(path: Path, **settings: Any) -> hf.Trainer:
    trainer = hf.Trainer(hf.TrainConfig(**{**TINY, "run_dir": str(path), **settings}))
    trainer.run()
    return trainer


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# --- one run per folder ----------------------------------------------------------------------------------------------


def test_a_new_run_does_not_take_the_folder_of_another(tmp_path: Path):
    run = folder(tmp_path / "run", [])
    run.prepare({"update": "autograd"})
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["engines"] == {"update": "autograd"}
    assert run.save(1)
    run.release()
    with pytest.raises(FileExistsError, match="already holds a run; resume it"):
        run.prepare({})
    run.prepare({}, resumed_at=1, resumed_from=run.last_checkpoint())  # a resumed run may
    run.release()


def test_a_second_run_is_refused_from_the_first_moment_and_leaves_no_trace(tmp_path: Path):
    first = folder(tmp_path / "run", [])
    first.prepare({})
    before = contents(tmp_path)
    for second in (folder(tmp_path / "run", []), folder(tmp_path / "run", [], seed=7)):
        with pytest.raises(
            FolderInUseError, match=rf"in use by another run \(process {os.getpid()} on .*; stop that run"
        ):
            second.prepare({})
        with pytest.raises(FolderInUseError):
            second.prepare({}, resumed_at=3)
    assert contents(tmp_path) == before
    first.release()
    folder(tmp_path / "run", []).prepare({})


def test_of_many_runs_that_start_together_one_gets_the_folder(tmp_path: Path):
    won, refused, start = [], [], threading.Barrier(16)

    def claim(number: int) -> None:
        run = folder(tmp_path / "run", [], seed=number)
        start.wait()
        try:
            run.prepare({})
            won.append(run)
        except FolderInUseError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(won) == 1 and len(refused) == 15
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == won[0]._config.seed


def test_runs_without_a_name_that_start_together_get_folders_of_their_own(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    trainers = [hf.Trainer(hf.TrainConfig(**TINY)) for _ in range(3)]
    threads = [threading.Thread(target=lambda t=t: t.folder.prepare({})) for t in trainers]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    names = sorted(str(trainer.folder.path) for trainer in trainers)
    assert names == [f"runs/TMaze-v0/{hf.TrainConfig(**TINY).automatic_name}{more}" for more in ("", "-2", "-3")]
    again = hf.TrainConfig.load(Path(names[1]) / "config.json")
    assert again.name is None, "so that a rerun of this config finds a free name too"


def test_the_same_config_object_serves_for_two_runs(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    config = hf.TrainConfig(**{**TINY, "total_steps": 16})
    assert [hf.Trainer(config).run().run_dir.name for _ in range(2)] == [
        config.automatic_name,
        f"{config.automatic_name}-2",
    ]


def test_a_run_that_died_before_its_first_checkpoint_starts_again_and_another_run_does_not(tmp_path: Path):
    class Die(hf.Callback):
        def on_update_end(self, trainer: hf.Trainer, row: Any) -> None:
            if trainer.update == 3:
                raise KeyboardInterrupt

    config = hf.TrainConfig(**{**TINY, "run_dir": str(tmp_path / "run"), "checkpoint_every": 0})
    with pytest.raises(KeyboardInterrupt):
        hf.Trainer(config, callbacks=[Die()]).run()
    before = contents(tmp_path / "run")
    assert len(read_progress(tmp_path / "run")) == 2
    with pytest.raises(
        FileExistsError, match=r"holds 2 updates of another run \(its seed is 1, this run's 5\); remove"
    ):
        train(tmp_path / "run", seed=5, checkpoint_every=0)
    assert contents(tmp_path / "run") == before
    train(tmp_path / "run", checkpoint_every=0)
    assert len(read_progress(tmp_path / "run")) == 6
    assert (tmp_path / "run/removed_after_update_00000000/removed_rows.csv").read_bytes() == before["progress.csv"]


# --- resuming --------------------------------------------------------------------------------------------------------


def test_what_a_resumed_run_repeats_is_moved_and_only_when_training_goes_on(tmp_path: Path):
    train(tmp_path / "run", keep_checkpoints=5)
    before = contents(tmp_path / "run")
    first = tmp_path / "run/checkpoints/update_00000002.pt"

    class Stop(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.Trainer.resume(first, callbacks=[Stop()], learning_rate=0.5).run()
    assert contents(tmp_path / "run") == before, "no update was finished: the folder is as it was"

    trainer, said = hf.Trainer.resume(first, keep_checkpoints=5), []
    trainer.notify = said.append  # type: ignore[method-assign]
    trainer.run()
    moved = tmp_path / "run/removed_after_update_00000002"
    assert any(str(moved) in line for line in said)
    assert (moved / "update_00000006.pt").read_bytes() == before["checkpoints/update_00000006.pt"]
    old = before["progress.csv"].splitlines()
    assert (moved / "removed_rows.csv").read_bytes().splitlines() == [old[0], *old[3:]]
    assert len(read_progress(tmp_path / "run")) == 6 and len(checkpoint.rolling(tmp_path / "run")) == 3


def test_a_copied_checkpoint_leaves_the_run_it_comes_from_alone(tmp_path: Path):
    train(tmp_path / "run", keep_checkpoints=5)
    before = contents(tmp_path / "run")
    copied = tmp_path / "elsewhere" / "copy.pt"
    copied.parent.mkdir()
    shutil.copy(tmp_path / "run/checkpoints/update_00000002.pt", copied)
    result = hf.Trainer.resume(copied).run()
    assert result.run_dir == tmp_path / "elsewhere" / "copy" and contents(tmp_path / "run") == before
    result = hf.Trainer.resume(copied, run_dir=str(tmp_path / "mine")).run()
    assert result.run_dir == tmp_path / "mine" and contents(tmp_path / "run") == before


def test_a_checkpoint_goes_on_in_no_folder_of_something_else(tmp_path: Path):
    train(tmp_path / "run")
    train(tmp_path / "other", seed=2)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    before = contents(tmp_path / "other"), contents(tmp_path / "photos")
    shutil.copy(tmp_path / "run/checkpoints/update_00000002.pt", tmp_path / "photos.pt")
    with pytest.raises(
        FileExistsError,
        match=r"photos already exists and holds no run; choose the folder to continue in with --run-dir",
    ):
        hf.Trainer.resume(tmp_path / "photos.pt").run()
    with pytest.raises(FileExistsError, match=r"holds another run \(its seed is 2, this run's 1\); choose another"):
        hf.Trainer.resume(tmp_path / "photos.pt", run_dir=str(tmp_path / "other")).run()
    assert (contents(tmp_path / "other"), contents(tmp_path / "photos")) == before


# --- disks -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError, match="cannot be written"):
        folder(tmp_path / "file" / "run", []).prepare({})


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(
        FileExistsError, match="notes is a file, expected a folder for the run; choose another --run-dir"
    ):
        folder(tmp_path / "notes", []).prepare({})
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_disk_that_refuses_is_retried_and_at_the_end_the_checkpoint_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    (tmp_path / "elsewhere").mkdir()
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


def test_rescued_checkpoints_of_two_runs_of_one_name_do_not_meet_and_follow_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "precious").write_text("precious")
    for planted in ("holdfast-run-update_00000006.pt", "holdfast-run-progress.csv"):
        (tmp_path / "tmp" / planted).symlink_to(tmp_path / "precious")
    runs = [folder(tmp_path / name / "run", [], refuses=True) for name in "ab"]
    [run.save_at_the_end(6) for run in runs]
    assert runs[0].saved_elsewhere != runs[1].saved_elsewhere and (tmp_path / "precious").read_text() == "precious"
    assert all(run.saved_elsewhere.parent.stat().st_mode & 0o077 == 0 for run in runs)


def test_a_folder_removed_during_a_run_is_made_again_and_the_run_goes_on(tmp_path: Path):
    class Remove(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            if trainer.update in (2, 5):
                shutil.rmtree(tmp_path / "run")

    said: list[str] = []
    trainer = hf.Trainer(hf.TrainConfig(**{**TINY, "run_dir": str(tmp_path / "run")}), callbacks=[Remove()])
    trainer.notify = said.append  # type: ignore[method-assign]
    trainer.run()
    assert [row["update"] for row in read_progress(tmp_path / "run")] == ["6"], "from the next row on"
    assert hf.TrainConfig.load(tmp_path / "run/config.json").seed == 1 and hf.load(tmp_path / "run") is not None
    assert sum("was removed during the run and has been recreated" in line for line in said) == 2


def test_a_folder_that_another_run_took_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    other = folder(tmp_path / "run", [], seed=9)

    class Take(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            if trainer.update == 2:
                shutil.rmtree(tmp_path / "run")
                other.prepare({})

    trainer = hf.Trainer(hf.TrainConfig(**{**TINY, "run_dir": str(tmp_path / "run")}), callbacks=[Take()])
    trainer.run()
    assert trainer.saved_elsewhere is not None and hf.load(trainer.saved_elsewhere) is not None
    assert set(contents(tmp_path / "run")) == {"config.json", "meta.json", "run.lock"}, "the other run's alone"
    (rows,) = (tmp_path / "tmp").glob("*/progress.csv")
    assert [row["update"] for row in read_progress(rows.parent)] == ["3", "4", "5", "6"]


@pytest.mark.parametrize("quiet", [False, True])
def test_disks_that_are_all_full_end_no_run_and_what_is_lost_is_said(
    quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """The run's folder, the temporary folder and every other place refuse from the third update on."""
    (tmp_path / "tmp").mkdir()
    for name in ("log", "folder"):
        monkeypatch.setattr(f"holdfast.runs.{name}.RESCUE_PLACES", (str(tmp_path / "tmp"), str(tmp_path / "no such")))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Fill(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            if trainer.update == 2:
                for place in ("record.Record.append", "checkpoint.write_whole", "log.write_whole"):
                    monkeypatch.setattr(f"holdfast.runs.{place}", refuse)

    config = hf.TrainConfig(**{**TINY, "run_dir": str(tmp_path / "run"), "quiet": quiet, "checkpoint_every": 2})
    trainer = hf.Trainer(config, callbacks=[Fill()])
    assert trainer.run().updates == 6 and trainer.saved_elsewhere is None
    said = "".join(capsys.readouterr())
    assert "update 6: 4 rows of the log are lost: no disk has room for them" in said
    assert "the checkpoint of update 6 is lost" in said and "the last one is" in said and "update_00000002.pt" in said
    assert [row["update"] for row in read_progress(tmp_path / "run")] == ["1", "2"]
    assert not list((tmp_path / "tmp").iterdir())


def test_a_full_temporary_folder_is_passed_over_for_a_disk_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "room").mkdir()
    places = (str(tmp_path / "no such"), str(tmp_path / "room"))
    monkeypatch.setattr("holdfast.runs.folder.RESCUE_PLACES", places)
    run = folder(tmp_path / "run", [], refuses=True)
    run.save_at_the_end(6)
    assert run.saved_elsewhere is not None and run.saved_elsewhere.parent.parent == tmp_path / "room"


def test_a_run_that_failed_before_its_first_update_leaves_its_name_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    class Fail(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            raise ValueError("to be repaired")

    config = {**TINY, "quiet": True, "run_dir": None}
    with pytest.raises(ValueError, match="to be repaired"):
        hf.Trainer(hf.TrainConfig(**config), callbacks=[Fail()]).run()
    first, second = (hf.Trainer(hf.TrainConfig(**config)).run().run_dir for _ in range(2))
    assert second.name == f"{first.name}-2" and sorted(first.parent.iterdir()) == [first, second]


def test_a_folder_in_use_and_a_folder_with_anything_else_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = {**TINY, "quiet": True, "run_dir": None}
    running, other = (hf.Trainer(hf.TrainConfig(**config)).folder for _ in range(2))
    running.prepare({})
    other.prepare({})
    assert other.path.name == f"{running.path.name}-2"
    running.release(), other.release()
    (running.path / "notes.txt").write_text("mine")
    third = hf.Trainer(hf.TrainConfig(**config)).folder
    third.prepare({})
    assert third.path == other.path


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/buffer-rank0"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_writes_and_deletes_nothing_in_a_folder_that_a_link_leads_to(link: str, resume: bool, tmp_path: Path):
    """A run that somebody sent may have links to folders of the same names: of another run, or of its buffer."""
    run, other = tmp_path / "run", tmp_path / "other"
    if resume:
        hf.Trainer(hf.TrainConfig(**{**TINY, "run_dir": str(run), "quiet": True})).run()
    (run / link).parent.mkdir(parents=True, exist_ok=True)
    if (run / link).exists():
        (run / link).rename(other)
    other.mkdir(exist_ok=True)
    for name in ("update_00000001.pt", "rows-00000001.bin"):
        (other / name).write_text("kept")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    (run / link).symlink_to(other)
    with pytest.raises(FileExistsError, match="is a link to a folder, and a run writes only into its own; remove it"):
        if resume:
            hf.Trainer.resume(run, total_steps=10_000).run()
        else:
            hf.Trainer(hf.TrainConfig(**{**TINY, "run_dir": str(run), "quiet": True})).run()
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before
    assert not (run / "run.lock").exists()
