"""A `SequenceBuffer` on disk: its rows in files that are only appended to, so that saving costs what was added since.

    folder/rows-00000001.bin     parts, one per save: a head, the row numbers, rows, starts and their states
    manifest                     in the checkpoint: names, lengths and SHA-256 of the files, and all small numbers

A manifest names the bytes at the beginning of each file, and nobody changes those. So a kill at any moment leaves the manifest
of the last checkpoint loadable. `prune`, once a checkpoint is written, deletes the files that neither it nor the checkpoint before
names: those whose rows were all overwritten. Files hold plain bytes; reading them runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.rollout.buffer_checks import FILE_NAME, check_counters, check_entries, check_start_rows, check_storage
from holdfast.state import leaves, tree_map

if TYPE_CHECKING:
    from holdfast.rollout.buffer import SequenceBuffer

_HEAD = struct.Struct("<8sQQ")  # magic, number of the first start, how many starts
_MAGIC = b"hf-rows\1"
_PIECE = 2**24  # bytes that are copied at a time
_SMALLEST_FILE = 2**22
_FILES = 16  # about so many hold a full buffer


def most_bytes_on_disk(full: int, saved_at_once: int) -> int:
    """Of a buffer that is `full` bytes with its states: its rows, files of which only some rows are still held, and what the last
    checkpoints need besides."""
    file = max(_SMALLEST_FILE, full // _FILES) + min(full, saved_at_once)
    return full + 2 * file + 3 * min(full, saved_at_once)


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
        # By the last two checkpoints. Whatever is here may belong to the newest one.
        self.needed = [{path.name for path in self._existing()}]
        self.named: set[str] | None = None  # by the last manifest, as long as its checkpoint may not have been written

    def _existing(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("rows-*.bin") if FILE_NAME.fullmatch(path.name))

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
        self.named = {file.name for file in self.files}
        return {
            "version": 1,
            **buffer.counters(),
            "rows_like": _without_rows(buffer.rows),
            "states_like": _without_rows(buffer.starts.states),
            "files": [file.entry() for file in self.files],
        }

    def prune(self) -> None:
        """The last manifest is in a checkpoint: delete what neither that one names nor the checkpoint before."""
        if self.named is None:
            return
        self.needed, self.named = [self.needed[-1], self.named], None
        for path in self._existing():
            if not any(path.name in names for names in self.needed):
                path.unlink(missing_ok=True)

    def _append(self, buffer: SequenceBuffer, written: Tensor) -> None:
        """A part with all rows and starts that are in no file yet."""
        largest = max(_SMALLEST_FILE, _bytes_of(buffer) // _FILES)
        if not self.can_append or self.files[-1].length >= largest:
            number = 1 + max((int(path.stem[5:]) for path in self._existing()), default=0)
            file = _File(f"rows-{number:08d}.bin", hashlib.sha256(), 0, written)
        else:
            file = self.files[-1]
        digest, length, path = file.digest.copy(), file.length, self.folder / file.name
        with open(path, "r+b" if length else "xb", opener=_without_links) as out:
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
        try:
            version = manifest.get("version") if isinstance(manifest, dict) else None
            if version != 1:
                raise ValueError(f"its format is version {version!r:.20}, this Holdfast reads 1")
            check_counters(buffer, manifest)
            check_storage(buffer, manifest)
            self._load(buffer, manifest)
        except (ValueError, MemoryError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{self.folder}: the buffer cannot be read: {reason}; begin with an empty one") from error

    def _load(self, buffer: SequenceBuffer, manifest: dict[str, Any]) -> None:
        streams, size, written = buffer.num_envs, manifest["start_slots"], manifest["written"]

        def room(like: Any, count: int) -> Any:
            return tree_map(lambda x: torch.zeros(count, *x.shape[1:], dtype=x.dtype), like)

        rows = room(manifest["rows_like"], streams * buffer.stream_rows + 1)
        states = room(manifest["states_like"], size)
        start_rows = torch.full((size, streams), -1)
        begins, ends = torch.zeros(streams, dtype=torch.int64), torch.zeros(streams, dtype=torch.int64)
        files, full = [], sum(x.numel() * x.element_size() for x in leaves((rows, states, start_rows)))
        for entry in check_entries(manifest["files"], 2 * full + 2 * _SMALLEST_FILE):
            data, digest = self._checked(entry)
            while data.left():
                magic, first_start, count_starts = _HEAD.unpack(data.bytes(_HEAD.size))
                first, count = data.tensor((streams,), torch.int64), data.tensor((streams,), torch.int64)
                in_range = (first >= 0) & (count >= 0) & (count <= buffer.stream_rows) & (first <= written - count)
                too_many = count_starts > size or first_start > manifest["start_count"] - count_starts
                if magic != _MAGIC or not bool(in_range.all()) or too_many:
                    raise ValueError(f"{entry['name']} is not a file of this buffer")
                begins, ends = torch.where(first == ends, begins, first), first + count
                slots = _slots(buffer, first, count)
                for leaf in leaves(rows):
                    leaf.index_copy_(0, slots, data.tensor((len(slots), *leaf.shape[1:]), leaf.dtype))
                numbers = torch.arange(first_start, first_start + count_starts) % size
                for leaf in (start_rows, *leaves(states)):
                    leaf.index_copy_(0, numbers, data.tensor((count_starts, *leaf.shape[1:]), leaf.dtype))
            files.append(_File(entry["name"], digest, entry["bytes"], ends))
        if not torch.equal(ends, written) or bool((begins > (written - buffer.stream_rows).clamp(min=0)).any()):
            raise ValueError("its files do not belong together")
        check_start_rows(start_rows, written)
        buffer.restore(manifest, *(tree_map(lambda x: x.to(buffer.device), x) for x in (rows, start_rows, states)))
        self.files, self.saved, self.can_append = files, written.clone(), False
        self.saved_starts = manifest["start_count"]

    def _checked(self, entry: dict[str, Any]) -> tuple[_Bytes, Any]:
        """The bytes that a manifest names, and their digest."""
        name, path = entry["name"], self.folder / entry["name"]
        try:
            if path.is_symlink():
                raise ValueError(f"{name} is a link, which is not followed")
            if not _has(path, entry["bytes"]):
                raise ValueError(f"{name} is missing or cut short")
            data = bytearray(entry["bytes"])
            with open(path, "rb", opener=_without_links) as file:
                file.readinto(data)
        except OSError as error:
            raise ValueError(f"{name} cannot be opened ({error.strerror})") from error
        digest = hashlib.sha256(data)
        if digest.hexdigest() != entry["sha256"]:
            raise ValueError(f"{name} is damaged, its SHA-256 does not match")
        return _Bytes(name, data), digest


class _Bytes:
    """Bytes that are read one tensor after another."""

    def __init__(self, name: str, data: bytearray) -> None:
        self.name, self.data, self.at = name, data, 0

    def left(self) -> bool:
        return self.at < len(self.data)

    def bytes(self, count: int) -> bytearray:
        if count > len(self.data) - self.at:
            raise ValueError(f"{self.name} ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = dtype.itemsize
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.bytes(count), dtype=dtype).view(shape)


def _slots(buffer: SequenceBuffer, first: Tensor, count: Tensor) -> Tensor:
    """Where `count` rows of each stream are stored, from number `first` on: one stream after another."""
    streams = torch.arange(len(count)).repeat_interleave(count)
    numbers = torch.arange(len(streams)) + (first - (count.cumsum(0) - count))[streams]
    return numbers % buffer.stream_rows + streams * buffer.stream_rows


def _bytes_of(buffer: SequenceBuffer) -> int:
    return sum(x.numel() * x.element_size() for x in leaves(buffer.rows))


def _without_rows(tree: Any) -> Any:
    """Shapes and dtypes: tensors that keep nothing of the storage of others."""
    return tree_map(lambda x: torch.empty(0, *x.shape[1:], dtype=x.dtype), tree)


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


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
