"""A `SequenceBuffer` on disk: its rows in files that are only appended to, so that saving costs what was added since.

    folder/rows-00000001.bin     parts, one per save: a head, the row numbers, rows, starts and their states
    manifest                     in the checkpoint: names, lengths and SHA-256 of the files, and all small numbers

A manifest names the bytes at the beginning of each file, and nobody changes those. So a kill at any moment leaves the manifest
of the last checkpoint loadable. A file is deleted when all its rows were overwritten and the last manifests do not name it. Files hold
plain bytes; reading them runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.state import leaves, tree_map

if TYPE_CHECKING:
    from holdfast.rollout.buffer import SequenceBuffer

_PATTERN = re.compile(r"rows-(\d{8})\.bin")
_HEAD = struct.Struct("<8sQQ")  # magic, number of the first start, how many starts
_MAGIC = b"hf-rows\1"
_PIECE = 2**24  # bytes that are copied at a time
_SMALLEST_FILE = 2**22
_FILES = 16  # about so many hold a full buffer
_MANIFESTS = (
    3  # files of so many are kept: this one, the last checkpoint's, and one whose checkpoint may not have been written
)


class _File:
    """A file, how much of it is ours, and the rows up to which it holds each stream."""

    def __init__(self, name: str, digest: Any, length: int, ends: Tensor) -> None:
        self.name, self.digest, self.length, self.ends = name, digest, length, ends

    def entry(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.length, "sha256": self.digest.hexdigest()}


class BufferFiles:
    """The files of a buffer in one folder."""

    def __init__(self, folder: Path, num_envs: int) -> None:
        self.folder = folder
        self.files: list[_File] = []  # oldest first
        self.saved = torch.zeros(num_envs, dtype=torch.int64)  # rows of each stream that are in files, or were
        self.saved_starts = 0
        self.can_append = False  # to the last file
        # Until something else was saved twice, whatever is here may belong to the newest checkpoint.
        self.named = [{path.name for path in self._existing()}] * (_MANIFESTS - 1)

    def _existing(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("rows-*.bin") if _PATTERN.fullmatch(path.name))

    # --- writing -----------------------------------------------------------------------------------------------------

    def save(self, buffer: SequenceBuffer) -> dict[str, Any]:
        """Write what was added since the last time. Returns the manifest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(not _has(self.folder / file.name, file.length) for file in self.files):
            self.files, self.can_append, self.saved_starts = [], False, 0  # somebody removed them: write everything
            self.saved.zero_()
        written = buffer.written.to("cpu", copy=True)
        if bool((written > self.saved).any()):
            self._append(buffer, written)
        oldest = written - buffer.stream_rows
        self.files = [file for file in self.files if bool((file.ends > oldest).any())]
        self.named = [*self.named[1 - _MANIFESTS :], {file.name for file in self.files}]
        for path in self._existing():
            if not any(path.name in names for names in self.named):
                path.unlink(missing_ok=True)
        return {
            "version": 1,
            **buffer.counters(),
            "rows_like": tree_map(lambda x: x[:0].cpu(), buffer.rows),
            "states_like": tree_map(lambda x: x[:0].cpu(), buffer.starts.states),
            "files": [file.entry() for file in self.files],
        }

    def _append(self, buffer: SequenceBuffer, written: Tensor) -> None:
        """A part with all rows and starts that are in no file yet."""
        largest = max(_SMALLEST_FILE, sum(x.numel() * x.element_size() for x in leaves(buffer.rows)) // _FILES)
        if not self.can_append or self.files[-1].length >= largest:
            number = 1 + max((int(path.stem[5:]) for path in self._existing()), default=0)
            file = _File(f"rows-{number:08d}.bin", hashlib.sha256(), 0, written)
        else:
            file = self.files[-1]
        digest, length, path = file.digest.copy(), file.length, self.folder / file.name
        with open(path, "r+b" if length else "xb") as out:
            out.truncate(length)  # what a failed write left
            out.seek(length)
            for piece in self._part(buffer, written):
                digest.update(piece)
                length += out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        if file.length == 0:
            _sync_folder(self.folder)
            self.files.append(file)
        file.digest, file.length, file.ends, self.can_append = digest, length, written, True
        self.saved, self.saved_starts = written, buffer.starts.count

    def _part(self, buffer: SequenceBuffer, written: Tensor) -> Iterator[memoryview | bytes]:
        starts = buffer.starts
        first = torch.maximum(self.saved, written - buffer.stream_rows)
        first_start = max(self.saved_starts, starts.count - len(starts.steps))
        yield _HEAD.pack(_MAGIC, first_start, starts.count - first_start)
        yield _bytes(first)
        yield _bytes(written - first)
        slots = _slots(buffer, first, written - first).to(buffer.device)
        for leaf in leaves(buffer.rows):
            yield from _pieces(leaf, slots)
        numbers = torch.arange(first_start, starts.count, device=buffer.device) % len(starts.rows)
        for leaf in (starts.rows, *leaves(starts.states)):
            yield from _pieces(leaf, numbers)

    # --- reading -----------------------------------------------------------------------------------------------------

    def load(self, buffer: SequenceBuffer, manifest: dict[str, Any]) -> None:
        """Fill a buffer. It stays as it was if a file is damaged or missing."""
        if manifest.get("version") != 1:
            raise _refused(self.folder, f"its format is version {manifest.get('version')}, this Holdfast reads 1")
        buffer.check(manifest)
        streams, device, size = buffer.num_envs, buffer.device, manifest["start_slots"]

        def room(like: Any, count: int) -> Any:
            return tree_map(lambda x: torch.zeros(count, *x.shape[1:], dtype=x.dtype, device=device), like)

        rows = room(manifest["rows_like"], streams * buffer.stream_rows + 1)
        states = room(manifest["states_like"], size)
        start_rows = torch.full((size, streams), -1, device=device)
        begins, ends = torch.zeros(streams, dtype=torch.int64), torch.zeros(streams, dtype=torch.int64)
        files = []
        for entry in manifest["files"]:
            data, digest = self._checked(entry)
            while data.left():
                magic, first_start, count_starts = _HEAD.unpack(data.bytes(_HEAD.size))
                if magic != _MAGIC:
                    raise _refused(self.folder / entry["name"], "this is not a file of a buffer")
                first, count = data.tensor((streams,), torch.int64), data.tensor((streams,), torch.int64)
                begins, ends = torch.where(first == ends, begins, first), first + count
                slots = _slots(buffer, first, count)
                for leaf in leaves(rows):
                    leaf.index_copy_(
                        0, slots.to(device), data.tensor((len(slots), *leaf.shape[1:]), leaf.dtype).to(device)
                    )
                numbers = torch.arange(first_start, first_start + count_starts, device=device) % size
                for leaf in (start_rows, *leaves(states)):
                    leaf.index_copy_(0, numbers, data.tensor((count_starts, *leaf.shape[1:]), leaf.dtype).to(device))
            files.append(_File(entry["name"], digest, entry["bytes"], ends))
        written = manifest["written"]
        if not torch.equal(ends, written) or bool((begins > (written - buffer.stream_rows).clamp(min=0)).any()):
            raise _refused(self.folder, "the files of the buffer do not belong together")
        buffer.restore(manifest, rows, start_rows, states)
        self.files, self.saved, self.saved_starts, self.can_append = (
            files,
            written.clone(),
            manifest["start_count"],
            False,
        )

    def _checked(self, entry: dict[str, Any]) -> tuple[_Bytes, Any]:
        """The bytes that a manifest names, and their digest."""
        name, length = entry["name"], entry["bytes"]
        path = self.folder / name
        if not _PATTERN.fullmatch(name):
            raise _refused(self.folder, f"the checkpoint names a file {name[:40]!r}, which no buffer has")
        try:
            if not _has(path, length):
                raise _refused(path, "this file of the buffer is missing or cut short")
            data = bytearray(length)
            with open(path, "rb") as file:
                file.readinto(data)
        except OSError as error:
            raise _refused(path, f"this file of the buffer cannot be read ({error.strerror})") from error
        digest = hashlib.sha256(data)
        if digest.hexdigest() != entry["sha256"]:
            raise _refused(path, "this file of the buffer is damaged, its SHA-256 does not match")
        return _Bytes(data), digest


class _Bytes:
    """Bytes that are read one tensor after another."""

    def __init__(self, data: bytearray) -> None:
        self.data, self.at = data, 0

    def left(self) -> bool:
        return self.at < len(self.data)

    def bytes(self, count: int) -> bytearray:
        self.at += count
        return self.data[self.at - count : self.at]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        empty = torch.empty(shape, dtype=dtype)
        if empty.numel() == 0:
            return empty
        return torch.frombuffer(self.bytes(empty.numel() * empty.element_size()), dtype=dtype).view(shape)


def _slots(buffer: SequenceBuffer, first: Tensor, count: Tensor) -> Tensor:
    """Where `count` rows of each stream are stored, from number `first` on: one stream after another."""
    streams = torch.arange(len(count)).repeat_interleave(count)
    numbers = torch.arange(len(streams)) + (first - (count.cumsum(0) - count))[streams]
    return numbers % buffer.stream_rows + streams * buffer.stream_rows


def _pieces(leaf: Tensor, rows: Tensor) -> Iterator[memoryview]:
    size = max(1, leaf[0].numel() * leaf.element_size())
    for some in rows.split(max(1, _PIECE // size)):
        if leaf[0].numel() and len(some):
            yield _bytes(leaf.index_select(0, some))


def _bytes(x: Tensor) -> memoryview:
    flat: Any = x.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(flat)


def _has(path: Path, length: int) -> bool:
    return path.is_file() and path.stat().st_size >= length


def _refused(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: {what}; resume with --refill-buffer, which starts with an empty buffer")


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
