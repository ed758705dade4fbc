"""The lock on a run folder: dead owners do not hold it, living ones and other machines do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.runs import lock
from holdfast.runs.lock import LOCK_NAME, FolderInUseError, RunLock

OWNER = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("lock", sys.argv[1])
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
held = lock.RunLock(__import__("pathlib").Path(sys.argv[2]))
held.claim()
is_run = len(sys.argv) > 3 and os.fork() != 0  # the child is an environment's worker, which outlives the run
if not is_run:
    print("claimed", flush=True)
time.sleep(20)
"""


def owner(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OWNER, lock.__file__, str(folder), *more]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "claimed\n"
    return child


@pytest.mark.parametrize("with_worker", [False, True])
def test_a_living_process_holds_the_folder_and_a_killed_one_does_not(tmp_path: Path, with_worker: bool):
    child = owner(tmp_path, *["worker"] * with_worker)
    with pytest.raises(FolderInUseError, match=f"in use by another run .process {child.pid} on "):
        RunLock(tmp_path).claim()
    child.send_signal(signal.SIGKILL)
    child.wait()
    RunLock(tmp_path).claim()


def test_an_owner_on_another_machine_holds_the_folder_until_the_user_takes_it(tmp_path: Path):
    mine = RunLock(tmp_path / "my run")
    mine.claim()
    path = tmp_path / "my run" / LOCK_NAME
    written = json.loads(path.read_text())
    assert written["pid"] == os.getpid() and written["started"] and written["since"]
    mine.release()
    path.write_text(json.dumps({**written, "host": "node-17"}))
    with pytest.raises(
        FolderInUseError, match=r"run on another machine .*on node-17.*; if that run is dead"
    ) as refused:
        RunLock(tmp_path / "my run").claim()
    line = str(refused.value)
    subprocess.run(line[line.index("rm ") : line.index("; otherwise")], shell=True, check=True)
    RunLock(tmp_path / "my run").claim()


def test_without_locks_of_the_system_the_process_itself_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError("this file system has none")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    mine = RunLock(tmp_path)
    mine.claim()
    with pytest.raises(FolderInUseError, match="in use by another run"):
        RunLock(tmp_path).claim()
    path = tmp_path / LOCK_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "started": "1"}))  # the number was given out again
    RunLock(tmp_path).claim()


@pytest.mark.parametrize("content", ["", "{", "[1]", "\0\0", '{"pid": "x"}'])
def test_a_damaged_lock_of_nobody_is_taken(tmp_path: Path, content: str):
    (tmp_path / LOCK_NAME).write_text(content)
    RunLock(tmp_path).claim()


def test_a_lock_is_not_written_through_a_link(tmp_path: Path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        RunLock(tmp_path / "run").claim()
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_lock_that_is_released_leaves_no_file_and_can_be_taken_at_once(tmp_path: Path):
    for _ in range(3):
        held = RunLock(tmp_path)
        held.claim()
        held.release()
        assert not (tmp_path / LOCK_NAME).exists()
