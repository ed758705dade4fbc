"""Checks of what a buffer is continued from: sizes, counters and shapes, before anything is replaced or allocated.

All came from a file, which may hold anything. Every refusal is a ValueError of one line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast import plain_checks as check
from holdfast.rollout.buffer_starts import FIRST_SLOTS
from holdfast.state import leaves, paths

if TYPE_CHECKING:
    from holdfast.rollout.buffer import SequenceBuffer

FILE_NAME = re.compile(r"rows-(\d{8})\.bin")
_LARGEST_ROW = 2**30  # bytes
_ROW = {"rewards": (), "flags": ()}  # shapes that every buffer has
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_counters(buffer: SequenceBuffer, d: Any) -> None:
    """Everything that `SequenceBuffer.counters` gives."""
    check.mapping(d, "the buffer", *buffer.counters())
    for name in ("capacity", "num_envs", "prioritized", "context"):
        own = getattr(buffer, name)
        if type(d[name]) is not type(own) or d[name] != own:
            raise ValueError(f"the saved buffer has {name} {d[name]!r:.40}, this one {own}")
    streams = (buffer.num_envs,)
    check.tensor(d["generator"], "generator", buffer.generator.get_state().shape, torch.uint8)
    if buffer.device.type == "cpu":
        check.generator_state(d["generator"], "generator")
    steps = check.integer(d["steps"], "steps", 0)
    written = check.tensor(d["written"], "written", streams, torch.int64)
    if bool(((written < steps) | (written > 2 * steps)).any()):
        raise ValueError(f"written is {written.tolist()!s:.60}, expected from {steps} to {2 * steps} rows")
    check.tensor(d["nonfinite"], "nonfinite", streams, torch.bool)
    check.tensor(d["open_truncation"], "open_truncation", streams, torch.bool)
    check.flag(d["has_added_rows"], "has_added_rows")
    if d["length"] is not None:
        check.integer(d["length"], "length", 1)
    check.integer(d["longest_chunk"], "longest_chunk", 0, steps)
    _check_starts(buffer, d, steps)


def _check_starts(buffer: SequenceBuffer, d: dict[str, Any], steps: int) -> None:
    slots = check.integer(d["start_slots"], "start_slots", FIRST_SLOTS, max(FIRST_SLOTS, 2 * buffer.stream_rows))
    if slots % FIRST_SLOTS or (slots // FIRST_SLOTS) & (slots // FIRST_SLOTS - 1):
        raise ValueError(f"start_slots is {slots}, expected {FIRST_SLOTS} times a power of 2")
    held = check.sequence(d["start_steps"], "start_steps")
    count = check.integer(d["start_count"], "start_count", len(held), steps)
    if len(held) > slots or (count and not held):
        raise ValueError(f"start_steps has {len(held)} entries, expected from 1 to {slots}")
    before = -1
    for step in held:
        before = check.integer(step, "start_steps", before + 1, steps - 1)
    largest = float(check.number(d["largest_priority"], "largest_priority", 1, 3e38))
    priorities = check.tensor(d["priorities"], "priorities", (slots, buffer.num_envs), torch.float32)
    if not bool(((priorities >= 0) & (priorities <= largest)).all()):
        raise ValueError(f"priorities are not all numbers from 0 to {largest:g}")


def check_storage(buffer: SequenceBuffer, d: dict[str, Any]) -> None:
    """The shapes of rows and states of a manifest, whose leaves have no rows: they say how much is allocated."""
    check.mapping(d, "the manifest", "files", "rows_like", "states_like")
    rows, states, blank = d["rows_like"], d["states_like"], d["blank"]
    if d["steps"] == 0:
        if rows or states or blank is not None or d["start_count"] or d["files"]:
            raise ValueError("it holds rows, but no steps")
        return
    check.mapping(rows, "rows", "obs", "actions", *_ROW)
    unknown = rows.keys() - {"obs", "actions", "action_mask", *_ROW}
    if unknown:
        raise ValueError(f"rows has {sorted(map(str, unknown))!s:.60}, which no buffer has")
    for name in rows.keys() - {"obs"}:
        if not isinstance(rows[name], Tensor):
            raise ValueError(f"rows {name} is a {type(rows[name]).__name__}, expected a tensor")
    size = _check_tree(rows, "rows", 0)
    for name, shape in _ROW.items():
        dtype = torch.uint8 if name == "flags" else rows[name].dtype
        check.tensor(rows[name], f"rows {name}", (0, *shape), dtype)
    if not rows["rewards"].is_floating_point():
        raise ValueError(f"rows rewards is {rows['rewards'].dtype}, expected floating-point numbers")
    if buffer.context is None:
        size += _check_tree(states, "states", 0)
        if _kinds(states, 2) != _kinds(blank, 1) or any(x.shape[1] != buffer.num_envs for x in leaves(states)):
            raise ValueError("its states are not all of the same shape")
    elif states:
        raise ValueError("it holds states, which a buffer with a context has not")
    _check_tree(blank, "blank", 1)
    if size > _LARGEST_ROW:
        raise ValueError(f"a row and a state take {size} bytes, at most {_LARGEST_ROW} are read")


def _check_tree(tree: Any, where: str, rows: int) -> int:
    """A tree of strided tensors [rows, ...]. Returns the bytes of one row."""
    if isinstance(tree, (dict, list, tuple)):
        parts = tree.values() if isinstance(tree, dict) else tree
        return sum(_check_tree(part, where, rows) for part in parts)
    if not isinstance(tree, Tensor) or tree.dim() < 1 or len(tree) != rows or tree.is_complex():
        shown = list(tree.shape) if isinstance(tree, Tensor) else type(tree).__name__
        raise ValueError(f"{where} is {shown!s:.40}, expected a tensor [{rows}, ...]")
    numbers = 1
    for size in tree.shape[1:]:
        numbers *= size
    return numbers * tree.element_size()


def _kinds(tree: Any, leading: int) -> dict[Any, Any]:
    """Shapes and dtypes of one row of one environment."""
    return {path: (x.shape[leading:], x.dtype) if isinstance(x, Tensor) else None for path, x in paths(tree)}


def check_entries(entries: Any, most_bytes: int) -> list[dict[str, Any]]:
    """The files of a manifest. most_bytes: that one may have."""
    names = []
    for entry in check.sequence(entries, "files"):
        check.mapping(entry, "a file of the buffer", "name", "bytes", "sha256")
        name, digest = entry["name"], entry["sha256"]
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise ValueError(f"it names a file {name!r:.60}, which no buffer has")
        check.integer(entry["bytes"], f"{name} bytes", 1, most_bytes)
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"the SHA-256 of {name} is {digest!r:.40}, expected 64 hexadecimal digits")
        names.append(name)
    if names != sorted(set(names)):
        raise ValueError("its files are not in order, or named twice")
    return list(entries)


def check_start_rows(rows: Tensor, written: Tensor) -> None:
    """Rows [N, B] where sequences begin; -1: nowhere."""
    if bool(((rows < -1) | (rows >= written)).any()):
        raise ValueError("a sequence begins at a row that was never written")
