"""How a run's files are written: complete or not at all, and never through a link that somebody else has planted."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import uuid4

TEMPORARY = ".*.tmp"
"""Files that an interrupted write leaves behind."""


def write_whole(path: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write a file: a new temporary file in the same folder, fsync, rename. A reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with open(handle, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def unlinked(path: str, flags: int) -> int:
    """`open(path, mode, opener=unlinked)` does not follow a link, which somebody else may have put there."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "this is a link, which is not followed; remove it", path) from error
        raise


RESCUE_PLACES = ("", "/var/tmp", "~")
"""Where to put what a run's own folder refuses, in this order: the temporary folder, and places on other disks."""


def rescue_folder(run: Path, place: str = "") -> Path:
    """A new folder that only this user can open, in one of RESCUE_PLACES. OSError if it cannot be made."""
    parent = os.path.expanduser(place) or tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=f"holdfast-{run.name}-", dir=parent))


def new_folder(path: Path) -> Path:
    """Make the folder `path`, or `path-2`, `path-3`, ...: the first that does not exist."""
    candidate, number = path, 1
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


# --- retries ---------------------------------------------------------------------------------------------------------
# When to try again after a disk refused a write: say so, go on, retry ever more rarely.


class RetrySchedule:
    """Counts updates, not seconds: all ranks must decide alike."""

    LONGEST_WAIT = 64  # updates

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.notify = notify
        self._retry_at: int | None = None
        self._wait = 1

    def should_retry(self, update: int) -> bool:
        """Whether a write failed and it is time for another attempt."""
        return self._retry_at is not None and update >= self._retry_at

    def must_wait(self, update: int) -> bool:
        """Whether a write failed and it is too early for another attempt."""
        return self._retry_at is not None and update < self._retry_at

    def record(self, problem: str | None, update: int) -> bool:
        """Note how an attempt ended (None: it succeeded); returns whether it succeeded."""
        if problem is None:
            if self._retry_at is not None:
                self.notify("saved; everything that failed before is now written")
            self._retry_at, self._wait = None, 1
            return True
        if self._retry_at is None:
            self.notify(f"cannot save ({problem}). Training continues, and saving is retried")
        self._retry_at = update + self._wait
        self._wait = min(2 * self._wait, self.LONGEST_WAIT)
        return False
