import json
import math

import numpy as np
import pytest

from holdfast.runs.log import RunLog, read_progress, write_metadata


def make_log(folder, **options):
    return RunLog(folder, **{"tensorboard": False, "wandb": False, "config": {}, **options})


def row(update, **more):
    return {
        "update": update,
        "steps": update * 10,
        "time/fps": 100.0 / update,
        "train/entropy": 1 / 3,
        **more,
    }


def test_floats_read_back_to_the_same_bits_and_time_comes_last(tmp_path):
    log = make_log(tmp_path)
    log.write(row(1, **{"train/entropy": np.float32(0.1)}), 10)
    log.write(row(2, **{"train/entropy": math.nan}), 20)
    log.close()
    lines = (tmp_path / "progress.csv").read_text().splitlines()
    assert lines[0] == "update,steps,train/entropy,time/fps"
    assert lines[1] == f"1,10,{float(np.float32(0.1))!r},100.0"
    assert lines[2] == "2,20,nan,50.0"


def test_a_row_is_in_the_file_before_the_log_is_closed(tmp_path):
    log = make_log(tmp_path)
    log.write(row(1), 10)
    assert len(read_progress(tmp_path)) == 1
    log.close()


def test_a_new_column_keeps_the_rows_that_were_there(tmp_path):
    log = make_log(tmp_path)
    log.write(row(1), 10)
    log.write(row(2, **{"eval/mean_return": 0.5}), 20)
    log.write(row(3), 30)
    log.close()
    lines = (tmp_path / "progress.csv").read_text().splitlines()
    assert lines[0] == "update,steps,train/entropy,eval/mean_return,time/fps"
    assert [line.split(",")[3] for line in lines[1:]] == ["", "0.5", ""]
    assert [r["update"] for r in read_progress(tmp_path)] == ["1", "2", "3"]
    assert not (tmp_path / "progress.csv.new").exists()


@pytest.mark.parametrize("cut", range(6))
def test_a_log_rewound_anywhere_ends_in_the_same_bytes(tmp_path, cut):
    def write(log, first):
        for update in range(first, 6):
            evaluation = {"eval/mean_return": update / 7} if update % 3 == 0 else {}
            log.write(row(update, **evaluation), update * 10)
        log.close()

    write(make_log(tmp_path / "whole"), 1)
    write(make_log(tmp_path / "cut"), 1)
    log = make_log(tmp_path / "cut")
    log.rewind(cut)
    assert len(read_progress(tmp_path / "cut")) == 5, "nothing is cut before the next row comes"
    write(log, cut + 1)
    assert (tmp_path / "cut/progress.csv").read_bytes() == (tmp_path / "whole/progress.csv").read_bytes()


def test_rewinding_drops_a_torn_last_line(tmp_path):
    log = make_log(tmp_path)
    for update in (1, 2, 3):
        log.write(row(update), update * 10)
    log.close()
    path = tmp_path / "progress.csv"
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:-9], whole + b"4,4"):
        path.write_bytes(torn)
        log = make_log(tmp_path)
        log.rewind(4)
        log.write(row(5), 50)
        log.close()
        kept = [r["update"] for r in read_progress(tmp_path)]
        assert kept == (["1", "2", "3", "5"] if torn.startswith(whole) else ["1", "2", "5"])


def test_a_new_log_without_rewind_begins_a_new_file(tmp_path):
    for _ in range(2):
        log = make_log(tmp_path)
        log.write(row(1), 10)
        log.close()
    assert [r["update"] for r in read_progress(tmp_path)] == ["1"]


def test_tensorboard_shows_each_step_once_after_a_rewind(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = make_log(tmp_path, tensorboard=True)
    for update in (1, 2, 3):
        log.write(row(update), update * 10)
    log.close()
    log = make_log(tmp_path, tensorboard=True)
    log.rewind(1)
    for update in (2, 3):
        log.write(row(update, **{"train/entropy": 5.0}), update * 10)
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/entropy")
    assert [(e.step, round(e.value, 3)) for e in events] == [(10, 0.333), (20, 5.0), (30, 5.0)]


def test_tracking_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        make_log(tmp_path, wandb=True)


def test_metadata_says_what_the_run_was_made_with(tmp_path):
    write_metadata(tmp_path, {"env": "holdfast/TMaze-v0", "seed": 3})
    assert json.loads((tmp_path / "config.json").read_text()) == {"env": "holdfast/TMaze-v0", "seed": 3}
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["packages"]["torch"] and meta["cpu"] and meta["command"]


def test_a_disk_that_fails_before_the_first_point_of_an_event_file_ends_no_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from holdfast.runs import log as tensorboard

    def refuse(*_, **__):
        raise OSError(5, "Input/output error")

    log = make_log(tmp_path / "run", tensorboard=True)
    monkeypatch.setattr(tensorboard.EventFile, "add", refuse)
    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    log.write(row(1), 10)
    monkeypatch.undo()
    log.write(row(2), 20)
    log.close()
    assert [line["update"] for line in read_progress(tmp_path / "run")] == ["1", "2"]


def test_an_event_file_is_not_written_through_a_link(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from holdfast.runs import log as tensorboard

    (tmp_path / "precious").write_text("kept")
    monkeypatch.setattr(tensorboard, "_number", iter([0, 0]))
    monkeypatch.setattr("time.time", lambda: 7.0)
    made = tensorboard.EventFile(tmp_path, 0)
    made.close()
    made.path.symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        tensorboard.EventFile(tmp_path, 0)
    assert (tmp_path / "precious").read_text() == "kept"


def test_the_password_of_a_database_is_not_in_the_metadata(tmp_path, monkeypatch):
    storage = "postgresql://me:secret@host/db"
    monkeypatch.setattr("sys.argv", ["holdfast", "sweep", "--storage", storage, f"--storage={storage}?password=secret"])
    write_metadata(tmp_path / "run", {})
    text = (tmp_path / "run/meta.json").read_text()
    assert "secret" not in text and "postgresql://me:***@host/db" in text
