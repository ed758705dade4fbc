"""`progress.csv`: damage is left out and reported, a refused row waits, and a removed file does not stop the record."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.runs.log import RunLog
from holdfast.runs.record import read_progress

HEADER, ROWS = "update,steps,train/loss,time/fps", [f"{n},{10 * n},{1 / n!r},5.0" for n in range(1, 7)]


def row(update: int) -> dict[str, float]:
    return {"update": update, "steps": 10 * update, "train/loss": 1 / update, "time/fps": 5.0}


def log_of(folder: Path, said: list[str], **options: bool) -> RunLog:
    return RunLog(folder, **{"tensorboard": False, "wandb": False, "config": {}, **options}, notify=said.append)


def file_of(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in [HEADER, *lines]).encode()


WHOLE = file_of(ROWS)
DAMAGES: dict[str, tuple[bytes, list[int], str]] = {  # the file, the updates that are left of the first 4, what is said
    "none": (WHOLE, [1, 2, 3, 4], ""),
    "empty": (b"", [], "no rows of updates 1 to 4"),
    "no header": ("".join(line + "\n" for line in ROWS).encode(), [], "no rows of updates 1 to 4"),
    "a header without update": (WHOLE.replace(b"update", b"epoch"), [], "no rows of updates 1 to 4"),
    "a column twice": (WHOLE.replace(b"steps", b"update", 1), [], "no rows of updates 1 to 4"),
    "not text": (bytes(range(256)) * 20, [], "no rows of updates 1 to 4"),
    "UTF-16": (WHOLE.decode().encode("utf-16"), [], "no rows of updates 1 to 4"),
    "a torn row inside": (file_of([*ROWS[:1], "2,20,0.", *ROWS[2:]]), [1, 3, 4], "1 damaged line (3)"),
    "a row glued to the next": (WHOLE.replace(b"5.0\n3,", b"5.03,", 1), [1, 4], "1 damaged line (3)"),
    "an update that is no number": (file_of([*ROWS[:1], "two,20,1,1", *ROWS[2:]]), [1, 3, 4], "1 damaged line (3)"),
    "an update that is nan": (file_of([*ROWS[:1], "nan,20,1,1", *ROWS[2:]]), [1, 3, 4], "1 damaged line (3)"),
    "an update that is missing": (file_of([*ROWS[:1], ",20,1,1", *ROWS[2:]]), [1, 3, 4], "1 damaged line (3)"),
    "a value that is no number": (file_of([*ROWS[:1], "2,20,abc,1", *ROWS[2:]]), [1, 3, 4], "1 damaged line (3)"),
    "NUL bytes": (file_of([*ROWS[:1], "\0" * 30, *ROWS[2:]]), [1, 3, 4], "1 damaged line (3)"),
    "a quote that does not end": (file_of([*ROWS[:1], '2,"20,1,1', *ROWS[2:]]), [1, 3, 4], "1 damaged line (3)"),
    "a very long cell": (file_of([*ROWS[:1], "2,20,1," + "1" * 200_000, *ROWS[2:]]), [1, 3, 4], "1 damaged line (3)"),
    "two runs in one file": (file_of([*ROWS[:3], *ROWS]), [1, 2, 3, 4], "3 damaged lines (5, 6, 7)"),
    "cut short": (file_of(ROWS[:2]) + b"3,3", [1, 2], "no rows of updates 3 to 4"),
    "Windows line ends": (WHOLE.replace(b"\n", b"\r\n"), [1, 2, 3, 4], ""),
    "damage after the checkpoint": (file_of([*ROWS[:4], "torn", *ROWS[5:]]), [1, 2, 3, 4], ""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record_is_continued_without_its_damage_and_one_line_says_so(tmp_path: Path, name: str):
    data, left, words = DAMAGES[name]
    (tmp_path / "progress.csv").write_bytes(data)
    said: list[str] = []
    log = log_of(tmp_path, said)
    log.rewind(4)
    assert (tmp_path / "progress.csv").read_bytes() == data, "nothing happens before the next row"
    log.write(row(5), 50)
    assert log.close() is None
    updates = [int(r["update"]) for r in read_progress(tmp_path)]
    assert updates == [*left, 5]
    assert any(words in line for line in said) if words else not said
    removed = b"".join(p.read_bytes() for p in tmp_path.glob("removed_after_update_00000004/*"))
    kept = (tmp_path / "progress.csv").read_bytes()
    lines = data.replace(b"\r", b"").split(b"\n")[1:] if name.startswith("Windows") else data.split(b"\n")[1:]
    assert all(line in removed.replace(b"\r\n", b"\n") or line + b"\n" in kept for line in lines), "no line is lost"


def test_a_folder_in_the_place_of_the_record_is_moved_out_of_the_way(tmp_path: Path):
    (tmp_path / "progress.csv").mkdir()
    log = log_of(tmp_path, said := [])
    log.rewind(4)
    log.write(row(5), 50)
    log.close()
    assert len(read_progress(tmp_path)) == 1 and "no rows of updates 1 to 4" in said[0]
    assert (tmp_path / "removed_after_update_00000004" / "progress.csv").is_dir()


def remove(path: Path) -> None:
    path.unlink()


def remove_the_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("update,steps\n1,1\n")
    other.replace(path)


@pytest.mark.parametrize("tensorboard", [False, True])
@pytest.mark.parametrize("harm", [remove, remove_the_folder, replace])
def test_a_record_that_is_removed_during_a_run_goes_on_with_the_next_row(
    tmp_path: Path, harm: Callable[[Path], None], tensorboard: bool
):
    run = tmp_path / "run"
    log = log_of(run, said := [], tensorboard=tensorboard)
    for update in range(1, 7):
        log.write(row(update), 10 * update)
        assert log.problem is None
        if update == 3:
            harm(run / "progress.csv")
    assert log.close() is None and not said
    there = (run / "progress.csv").read_bytes().split(b"\n")
    assert there[0].decode() == HEADER and there[-4:] == [*(line.encode() for line in ROWS[3:]), b""]
    assert len(there) == (6 if harm is replace else 5), "what was put in its place is continued"
    if tensorboard:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(run)).Reload().Scalars("train/loss")
        assert [event.step for event in events][-3:] == [40, 50, 60]


def test_rows_wait_while_the_file_cannot_be_rewritten_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = log_of(tmp_path, [])
    log.write(row(1), 10)

    def full(path: Path, chunks: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.runs.record.write_whole", full)
        assert log.write({**row(2), "eval/mean_return": 0.5}, 20), "a new column: the file has to be rewritten"
        assert not log.write(row(3), 30) and log.problem == "[Errno 28] No space left on device"
        assert [r["update"] for r in read_progress(tmp_path)] == ["1"]
    log.write(row(4), 40)
    assert log.close() is None and log.problem is None
    assert [r["update"] for r in read_progress(tmp_path)] == ["1", "2", "3", "4"]
