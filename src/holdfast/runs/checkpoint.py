"""Checkpoint files: data that can never run code, written atomically, checked before they are read.

    holdfast checkpoint 1\\n      what it is, and the version of the format
    <SHA-256 of the rest, hex>\\n
    <payload>                    torch.save of tensors, numbers, strings, lists and dicts, nothing else

The digest is checked first, because torch loads a flipped bit silently. This file does not know what is inside.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.runs.writing import TEMPORARY, write_whole
from holdfast.shown_text import printable

MAGIC = b"holdfast checkpoint "
VERSION = 1


class CheckpointError(Exception):
    """A checkpoint that cannot be used, and why."""


@contextlib.contextmanager
def refusals(file: Path, what: str = "its contents do not fit a run") -> Iterator[None]:
    """Turn every error into a `CheckpointError` of one line. For code that works with what a file holds."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = printable(" ".join(str(error).split()))
        reason = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        raise CheckpointError(f"{file}: {what} ({reason[:300]})") from error


def save(path: str | Path, payload: dict[str, Any]) -> None:
    """Write `payload` to `path`: a temporary file in the same folder, fsync, rename."""
    path = Path(path)
    _require_plain(payload, "payload")
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    body = buffer.getbuffer()
    digest = hashlib.sha256(body).hexdigest().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [MAGIC + str(VERSION).encode() + b"\n" + digest + b"\n", body])


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint, or raise `CheckpointError` with the reason. Runs no code from the file."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    head, _, rest = data.partition(b"\n")
    if not head.startswith(MAGIC):
        damaged = ", or its first bytes are damaged" if path.suffix == ".pt" else ""
        raise CheckpointError(f"{path}: this is not a Holdfast checkpoint{damaged}")
    version = head[len(MAGIC) :]
    if version != str(VERSION).encode():
        raise CheckpointError(
            f"{path}: format version {version[:20].decode(errors='replace')!r}, this Holdfast reads version {VERSION}"
        )
    digest, newline, body = rest.partition(b"\n")
    if not newline or hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(f"{path}: damaged or cut short (its SHA-256 does not match its contents)")
    try:
        _require_uncompressed(body)
        payload = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        if not isinstance(payload, dict):
            raise CheckpointError(f"{path}: holds a {type(payload).__name__}, expected a dict")
        _require_plain(payload, "payload")
        return _dense(payload, len(body))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: holds more than plain data and was not loaded ({type(error).__name__})"
        ) from error


def _require_uncompressed(body: bytes) -> None:
    """A compressed archive may be far larger inside than the file is; torch writes none."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > len(body):
            raise ValueError("the archive is larger unpacked than the file")


def _dense(value: Any, most_bytes: int) -> Any:
    """`value` with contiguous tensors only. A tensor that claims more numbers than the file holds is refused: a file can
    describe a huge tensor by a few bytes that are read again and again."""
    if isinstance(value, dict):
        return {key: _dense(inner, most_bytes) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_dense(inner, most_bytes) for inner in value)
    if not isinstance(value, Tensor):
        return value
    if type(value) is not Tensor or value.layout is not torch.strided or not value.is_cpu or value.is_quantized:
        raise TypeError(f"a {type(value).__name__} of layout {value.layout} on {value.device}")
    if value.numel() * value.element_size() > most_bytes:
        raise ValueError("a tensor is larger than the file")
    return value.detach().contiguous()


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


# --- the checkpoints of a run ---------------------------------------------------------------------------------------


FOLDER = "checkpoints"


def folder_of(run: str | Path) -> Path:
    return Path(run) / FOLDER


def path_for(run: str | Path, update: int) -> Path:
    return folder_of(run) / f"update_{update:08d}.pt"


def rolling(run: str | Path) -> list[Path]:
    """A run's rolling checkpoints, oldest first."""
    return sorted(folder_of(run).glob("update_*.pt"))


def prune(run: str | Path, keep: int) -> None:
    """Remove all but the newest `keep` rolling checkpoints, and what interrupted writes left behind."""
    for old in rolling(run)[: -max(1, keep)]:
        old.unlink(missing_ok=True)
    for torn in folder_of(run).glob(TEMPORARY):
        torn.unlink(missing_ok=True)


def later_than(run: str | Path, update: int) -> list[Path]:
    """The rolling checkpoints of later updates."""
    return [path for path in rolling(run) if path.name > path_for(run, update).name]


def run_of(file: Path) -> Path:
    """The folder in which a run goes on from this file: its own, or a new one next to a file that was copied elsewhere.

    What the file itself says about a folder is not asked.
    """
    file = file if file.parent.name else file.absolute()
    return file.parent.parent if file.parent.name == FOLDER else file.with_suffix("")


def find(path_or_run: str | Path) -> Path:
    """A checkpoint file from a file, or the newest of a run folder."""
    path = Path(path_or_run)
    if path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or run folder")
    found = rolling(path)
    if not found:
        runs = sorted(
            {file.parent.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/{FOLDER}/update_*.pt")}
        )
        if runs:
            raise CheckpointError(f"{path}: this folder holds runs ({len(runs)}); name one of them, such as {runs[0]}")
        raise CheckpointError(f"{path}: this folder holds no checkpoints (expected checkpoints/update_*.pt)")
    return found[-1]


def load_from(path_or_run: str | Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint and where it was; if it is refused, the error names what to pass instead."""
    path = find(path_or_run)
    try:
        return path, load(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_instead_of(path)}") from error


def _instead_of(path: Path) -> str:
    """What can be read instead of a file that was refused: the checkpoint before it, or the run that it lies in."""
    if path.absolute().parent.name == FOLDER:
        others = [p for p in rolling(path.parent.parent) if p != path]
        if path.name.startswith("update_"):
            others = [p for p in others if p.name < path.name]
        return f". The previous checkpoint is {others[-1]}" if others else ". This run has no earlier checkpoint"
    run = next((folder for folder in list(path.parents)[:2] if rolling(folder)), None)
    return "" if run is None else f". It lies in a run: name the run's folder, {run}"
