"""`RunLock`: one run writes a folder at a time.

The file `run.lock` in the folder says who: process, host, when it started. The owner also holds a lock of the operating
system on it (flock), which ends with the process, however it ends. So a dead owner on this machine holds nothing. Of an
owner on another machine nobody can say whether it lives: it keeps the folder until the user removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
import time
import weakref
from pathlib import Path
from typing import IO, Any

from holdfast.runs.writing import unlinked

LOCK_NAME = "run.lock"


class FolderInUseError(FileExistsError):
    """Another process writes this folder."""


class RunLock:
    """The right to write one folder. `claim` takes it, `keep` makes sure that it is still held, `release` gives it back."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / LOCK_NAME
        self._file: IO[bytes] | None = None

    def claim(self) -> None:
        """Make the folder if needed and take it, or raise `FolderInUseError` with the owner and what to do."""
        while self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "a+b", buffering=0, opener=unlinked)  # noqa: SIM115  (open as long as it is held)
            try:
                locked = _lock(file)
                if locked is False:
                    raise FolderInUseError(self._refusal(_owner(file)))
                if not self._is_at_path(file):  # the owner before removed it as we opened it
                    file.close()
                    continue
                owner = _owner(file)
                if may_live(owner, has_locks=locked is not None):
                    raise FolderInUseError(self._refusal(owner))
                file.seek(0)
                file.truncate()
                file.write(json.dumps(this_process()).encode() + b"\n")
            except BaseException:
                file.close()
                raise
            self._file = file
            _held.add(self)

    def keep(self) -> bool:
        """Whether the folder is still as it was claimed. If it was removed, claim it again and return False.

        Raises `FolderInUseError` if another process has taken it since.
        """
        if self._file is not None and self._is_at_path(self._file):
            return True
        self._close()
        self.claim()
        return False

    def release(self) -> None:
        """Give the folder back. A no-op if it is not held."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                if self._is_at_path(self._file):
                    self.path.unlink()
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_at_path(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path, follow_symlinks=False))
        except OSError:
            return False

    def _refusal(self, owner: dict[str, Any]) -> str:
        folder = self.path.parent
        who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'this machine')}"
        since = f", since {owner['since']}" if "since" in owner else ""
        if owner.get("host", _host()) == _host():
            return f"{folder} is in use by another run ({who}{since}); stop that run, or choose another --name or --run-dir"
        return (
            f"{folder} belongs to a run on another machine ({who}{since}); if that run is dead, release the folder with "
            f"rm {shlex.quote(str(self.path))}; otherwise choose another --name or --run-dir"
        )


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked process (an environment's worker) must not hold the folder when the run itself has died."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget_in_child)


def _lock(file: IO[bytes]) -> bool | None:
    """Take the system's lock on this file; False if somebody else has it, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _owner(file: IO[bytes]) -> dict[str, Any]:
    """What the file says; {} if it says nothing that can be read."""
    file.seek(0)
    try:
        owner = json.loads(file.read(10_000))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def may_live(owner: dict[str, Any], has_locks: bool) -> bool:
    """Whether the owner that a file names may still run, though nobody holds the system's lock on it."""
    if owner.get("host") != _host():
        return "host" in owner  # a file that names nobody is nobody's
    if has_locks:
        return False
    pid = owner.get("pid")
    return isinstance(pid, int) and _is_running(pid) and owner.get("started") == _start_of(pid)


def this_process() -> dict[str, Any]:
    pid = os.getpid()
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": pid, "host": _host(), "started": _start_of(pid), "since": now}


def _host() -> str:
    return socket.gethostname()


def _is_running(pid: int) -> bool:
    if pid <= 0:  # would ask for a group of processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _start_of(pid: int) -> str | None:
    """When a process started, in the system's clock ticks; a later process with the same number started later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
