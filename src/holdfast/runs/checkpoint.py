"""Checkpoint files: data that can never run code, written atomically, checked before they are read.

    holdfast checkpoint 1\\n      what it is, and the version of the format
    <SHA-256 of the rest, hex>\\n
    <payload>                    torch.save of tensors, numbers, strings, lists and dicts, nothing else

The digest is checked first, because torch loads a flipped bit silently. This file does not know what is inside.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAGIC = b"holdfast checkpoint "
VERSION = 1


class CheckpointError(Exception):
    """A checkpoint that cannot be used, and why."""


def save(path: str | Path, payload: dict[str, Any]) -> None:
    """Write `payload` to `path`: a temporary file in the same folder, fsync, rename."""
    path = Path(path)
    _require_plain(payload, "payload")
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    body = buffer.getbuffer()
    digest = hashlib.sha256(body).hexdigest().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(MAGIC + str(VERSION).encode() + b"\n" + digest + b"\n")
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint, or raise `CheckpointError` with the reason. Runs no code from the file."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    head, _, rest = data.partition(b"\n")
    if not head.startswith(MAGIC):
        raise CheckpointError(f"{path}: this is not a Holdfast checkpoint, or its first bytes are damaged")
    version = head[len(MAGIC) :]
    if version != str(VERSION).encode():
        raise CheckpointError(
            f"{path}: format version {version[:20].decode(errors='replace')!r}, this Holdfast reads version {VERSION}"
        )
    digest, newline, body = rest.partition(b"\n")
    if not newline or hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(f"{path}: damaged or cut short (its SHA-256 does not match its contents)")
    try:
        payload = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path}: holds more than plain data and was not loaded ({type(error).__name__})"
        ) from error
    if not isinstance(payload, dict):
        raise CheckpointError(f"{path}: holds a {type(payload).__name__}, expected a dict")
    return payload


def _require_plain(value: Any, where: str) -> None:
    """Only tensors, numbers, strings, None, lists and dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, (str, int)):
                raise TypeError(f"{where}: a checkpoint's keys are strings or integers, got {key!r}")
            _require_plain(inner, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, inner in enumerate(value):
            _require_plain(inner, f"{where}[{i}]")
    elif value is not None and not isinstance(value, Tensor) and type(value) not in (bool, int, float, str):
        raise TypeError(
            f"{where}: a checkpoint holds tensors, numbers, strings, lists and dicts, got a {type(value).__name__}"
        )


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


# --- the checkpoints of a run ---------------------------------------------------------------------------------------


def folder_of(run: str | Path) -> Path:
    return Path(run) / "checkpoints"


def path_for(run: str | Path, update: int) -> Path:
    return folder_of(run) / f"update_{update:08d}.pt"


def rolling(run: str | Path) -> list[Path]:
    """A run's rolling checkpoints, oldest first."""
    return sorted(folder_of(run).glob("update_*.pt"))


def prune(run: str | Path, keep: int) -> None:
    """Remove all but the newest `keep` rolling checkpoints, and what interrupted writes left behind."""
    for old in rolling(run)[: -max(1, keep)]:
        old.unlink(missing_ok=True)
    for torn in folder_of(run).glob(".*.tmp"):
        torn.unlink(missing_ok=True)


def drop_after(run: str | Path, update: int) -> None:
    """Remove the rolling checkpoints of later updates."""
    last = path_for(run, update).name
    for later in rolling(run):
        if later.name > last:
            later.unlink(missing_ok=True)


def find(path_or_run: str | Path) -> Path:
    """A checkpoint file from a file, or the newest of a run folder."""
    path = Path(path_or_run)
    if path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or run folder")
    found = rolling(path)
    if not found:
        raise CheckpointError(f"{path}: this folder holds no checkpoints (expected checkpoints/update_*.pt)")
    return found[-1]


def load_from(path_or_run: str | Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint and where it was; if it is refused, the error names the one before it."""
    path = find(path_or_run)
    try:
        return path, load(path)
    except CheckpointError as error:
        others = [p for p in rolling(path.parent.parent) if p != path]
        if path.name.startswith("update_"):
            others = [p for p in others if p.name < path.name]
        hint = f"The one before it: {others[-1]}" if others else "There is no earlier one in this run"
        raise CheckpointError(f"{error}. {hint}") from error
