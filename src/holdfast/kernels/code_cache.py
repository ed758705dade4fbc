"""The cache of compiled code, for the C library and for CUDA kernels. Code from it runs in this process, so it is trusted
only if nobody else could have written it, and only if it is whole.

- The folder and every folder above it belong to this user or to root, and others may not write them (a sticky folder
  such as /tmp may stand above). A file belongs to this user or to root, and others may not write it.
- Next to each file is its SHA-256. A file that does not match is compiled again: a truncated library would end the
  process when it is loaded.

This file needs only the standard library, because `cpu/build.py` does.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
import sys
import tempfile
from pathlib import Path


class UntrustedCacheError(OSError):
    """Others could put code into the cache; the message says what to do."""


def folder() -> Path:
    """`$HOLDFAST_CACHE`, or `holdfast` in the user's cache folder; without a home, a folder of the user's in /tmp."""
    given = os.environ.get("HOLDFAST_CACHE")
    if given:
        return Path(given).absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute() and sys.platform != "darwin":
        return shared / "holdfast"
    home = _home()
    if home is None:
        return Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "holdfast"


def find(name: str) -> Path | None:
    """The file of this name, if it is there, whole, and written by nobody else. UntrustedCacheError for the folder."""
    path = folder() / name
    if not path.parent.is_dir():
        return None
    _require_private(path.parent)
    try:
        whole = _digest_file(path).read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
    return path if whole and _only_ours(path) and _only_ours(_digest_file(path)) else None


def prepare() -> Path:
    """The folder, made if needed; what is made can be opened by this user alone."""
    target = folder()
    missing = [path for path in (target, *target.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    _require_private(target)
    return target


def store(name: str, data: bytes) -> None:
    """Put a file into the cache; it appears complete or not at all."""
    target = prepare() / name
    handle, temporary = tempfile.mkstemp(dir=target.parent)
    with open(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, target)
    seal(name)


def seal(name: str) -> None:
    """Note the digest of a file that was written to the folder, so that `find` accepts it."""
    path = folder() / name
    path.chmod(0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with open(handle, "w") as file:
        file.write(hashlib.sha256(path.read_bytes()).hexdigest())
    os.replace(temporary, _digest_file(path))


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _home() -> Path | None:
    given = os.environ.get("HOME")
    if given:
        return Path(given).absolute()
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # no such user: a container with a number for a user
        return None


def _require_private(target: Path) -> None:
    real = target.resolve()
    for path in (real, *real.parents):
        status = path.stat()
        sticky = bool(status.st_mode & stat.S_ISVTX) and path != real
        if status.st_uid not in (os.getuid(), 0):
            reason = f"{path} belongs to another user (uid {status.st_uid})"
        elif _others_may_write(status) and not sticky:
            reason = f"others may write {path}"
        else:
            continue
        raise UntrustedCacheError(f"{reason}, so code from the cache {target} is not trusted: set HOLDFAST_CACHE to "
                                  "your own folder, or remove that permission (chmod go-w)")  # fmt: skip


def _only_ours(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid in (os.getuid(), 0) and not _others_may_write(status)


def _others_may_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_group_of_one(status.st_gid)


def _is_group_of_one(gid: int) -> bool:
    """Whether a group is a user's own, as on systems where each user has one: folders are writable for it by default."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
