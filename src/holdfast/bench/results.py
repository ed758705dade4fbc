"""`results.jsonl`: one line per finished run, appended and never rewritten.

A kill in the middle of a write leaves a torn line, which readers skip and the next line does not join.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.runs.writing import unlinked

FILE_NAME = "results.jsonl"
_NEEDED = {"id": str, "task": str, "core": str, "seed": int, "steps": int, "setting": str}
_NUMBERS = (
    "seed", "steps", "final", "best", "best_at", "final_std_error", "final_deterministic", "trained_steps",
    "steps_per_second", "seconds", "wall_seconds",
)  # fmt: skip
_LARGEST = 1e30
Row = dict[str, Any]


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Write one line, and have it on the disk when this returns."""
    line = (json.dumps(row) + "\n").encode()
    with open(path, "a+b", buffering=0, opener=unlinked) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                line = b"\n" + line
        rest = memoryview(line)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def read(path: Path) -> tuple[list[Row], int]:
    """The rows of a file, and how many lines were torn or are no results."""
    if not path.is_file():
        return [], 0
    rows, damaged = [], 0
    for line in path.read_bytes().split(b"\n"):
        row = _parse(line) if line.strip() else {}
        if row is None:
            damaged += 1
        elif row:
            rows.append(row)
    return rows, damaged


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ok = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in _NEEDED.items())
    return row if ok and _fits_a_report(row) else None


def _fits_a_report(row: Row) -> bool:
    """Whether all that a table or a page shows of a row is of its type. A row without a result says why the run failed."""
    numbers = [row[name] for name in _NUMBERS if row.get(name) is not None]
    tables = {name: row.get(name, {}) for name in ("engine", "config", "command")}
    if ("final" in row and row["final"] is None) or not all(isinstance(table, dict) for table in tables.values()):
        return False
    curve = row.get("curve", [])
    if not isinstance(curve, list) or not all(isinstance(point, list) and len(point) == 2 for point in curve):
        return False
    numbers += [tables["command"].get("elapsed", 0.0), *(part for point in curve for part in point)]
    return all(map(_is_number, numbers)) and all(isinstance(name, str) for name in tables["engine"].values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def finished(rows: Iterable[Row]) -> dict[str, Row]:
    """The latest result of every run that has one, by its id."""
    return {row["id"]: row for row in rows if "final" in row}


def latest(rows: Iterable[Row]) -> list[Row]:
    """One result per task, core, seed, setting and number of steps: the latest."""
    found = {
        tuple(row[name] for name in ("task", "core", "seed", "setting", "steps")): row for row in rows if "final" in row
    }
    return list(found.values())


def wall_seconds(rows: Iterable[Row]) -> float:
    """Time of all commands that made these rows, each up to its last finished run."""
    commands: dict[str, float] = {}
    for row in rows:
        command = row.get("command", {})
        began = str(command.get("began"))
        commands[began] = max(commands.get(began, 0.0), float(command.get("elapsed", 0.0)))
    return sum(commands.values())
