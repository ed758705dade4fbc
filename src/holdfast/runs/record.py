"""`Record`: a run's `progress.csv`, one row per update.

Floats are written so that they read back to the same bits. Each row goes to the operating system at once, so a killed run
loses at most the row being written. A long run's record is thinned out to at most MAX_ROWS rows. If the file is removed
during a run, the next row starts a new one; earlier rows are not restored.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from holdfast.runs.writing import write_whole

CSV_NAME = "progress.csv"
MAX_ROWS = 20_000
"""A run of more updates keeps every second row, then every fourth, ..."""


class Record:
    """Appends rows to `folder/progress.csv`. A new record starts a new file at its first row; `cut` continues an old one.

    notify: shows the user a line.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        self.path = folder / CSV_NAME
        self._notify = notify
        self._columns: list[str] = []
        self._stride = 1  # of the rows in the file
        self._file: IO[bytes] | None = None
        self._started = False  # whether the rows in the file are this record's
        self._planned_cut: Callable[[], None] | None = None

    def append(self, row: Mapping[str, float]) -> None:
        """Write a row; OSError if the disk refuses, and then the file is as it was."""
        if self._planned_cut is not None:
            self._planned_cut()
            self._planned_cut = None
        columns = _ordered([*self._columns, *row])
        keep_every = stride(row["update"])
        file = self._file
        removed = file is not None and os.fstat(file.fileno()).st_nlink == 0
        if file is None or columns != self._columns or keep_every > self._stride or removed:
            rows = read_progress(self.path.parent) if self._started else []
            kept = [old for old in rows if int(float(old["update"])) % keep_every == 0]
            file = self._replace(_encoded(kept, columns))
            self._columns, self._stride = columns, keep_every
        rest = memoryview(_line(_text(row[name]) if name in row else "" for name in self._columns))
        end = file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)  # no torn line in the middle of the record
            raise

    def cut(self, update: int, backup: Callable[[], Path]) -> list[dict[str, str]]:
        """Continue the existing file from the row of `update`. Returns the rows up to it, as text.

        The file changes when the next row is appended. Rows that are dropped then are moved to the folder that `backup`
        returns. Missing or damaged rows are reported.
        """
        self.close()
        found = self.path.read_bytes() if self.path.is_file() else b""
        parsed = _parse(found)
        rows = [row for row in parsed.rows if float(row["update"]) <= update]
        # Columns that only later rows have are dropped too: the file is what it was at that update.
        columns = _ordered(name for row in rows for name, text in row.items() if text != "")
        self._columns, self._stride, self._started = columns, stride(update), False
        self._report_losses(parsed, update, int(float(rows[-1]["update"])) if rows else 0)
        kept = {line for line, row in zip(parsed.lines, parsed.rows) if float(row["update"]) <= update}
        lines = [line + b"\n" for line in found.split(b"\n")]
        if lines[-1] == b"\n":
            lines.pop()
        removed = [line for number, line in enumerate(lines, 1) if number > 1 and number not in kept]

        def apply() -> None:
            if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
                os.rename(self.path, backup() / CSV_NAME)
            if removed:
                write_whole(backup() / "removed_rows.csv", [b"".join([*lines[:1], *removed])])
            if rows:
                self._replace(_encoded(rows, columns))
            else:
                self.path.unlink(missing_ok=True)

        self._planned_cut = apply
        return rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- inside ------------------------------------------------------------------------------------------------------

    def _replace(self, text: bytes) -> IO[bytes]:
        """Rewrite the whole file; a reader sees the old one or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, [text])
        self.close()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (open until the run ends)
        self._started = True
        return self._file

    def _report_losses(self, parsed: _Parsed, update: int, last: int) -> None:
        lost = [str(line) for line, before in parsed.damaged if before < update]
        if lost:
            some = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
            count = "1 damaged line" if len(lost) == 1 else f"{len(lost)} damaged lines"
            self._notify(f"{self.path}: {count} ({some}) left out of the record")
        newest = max((float(row["update"]) for row in parsed.rows), default=0.0)
        if update - last >= max(stride(update), stride(newest)):
            self._notify(
                f"{self.path} has no rows of updates {last + 1} to {update}; the record continues without them"
            )


class _Parsed(NamedTuple):
    rows: list[dict[str, str]]
    lines: list[int]  # the number of each row's line
    damaged: list[tuple[int, float]]  # lines that are no row, each with the update of the row before it


def _parse(data: bytes | bytearray) -> _Parsed:
    """The rows of a file in any condition. A row has a number or nothing in every column, and a later update than the
    row before it. What follows the last newline is torn."""
    header, *lines = data.decode("utf-8-sig", errors="replace").split("\n")[:-1] or [""]
    columns = _cells(header)
    known = "update" in columns and len(set(columns)) == len(columns)
    parsed, before = _Parsed([], [], []), 0.0
    for number, line in enumerate(lines, 2):
        cells = _cells(line)
        row = dict(zip(columns, cells))
        whole = known and len(cells) == len(columns) and all(map(_is_number, cells))
        if whole and before < float(row["update"] or 0) < math.inf:
            parsed.rows.append(row)
            parsed.lines.append(number)
            before = float(row["update"])
        else:
            parsed.damaged.append((number, before))
    return parsed


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _is_number(text: str) -> bool:
    try:
        return text == "" or float(text) is not None
    except ValueError:
        return False


def read_progress(run: str | Path) -> list[dict[str, str]]:
    """The rows of a run's `progress.csv` as text, without torn and damaged lines; none without a file."""
    path = Path(run) / CSV_NAME
    return _parse(path.read_bytes()).rows if path.is_file() else []


def stride(update: float) -> int:
    """A run of so many updates keeps every n-th row: n.

    >>> [stride(update) for update in (1, 20_000, 20_001, 40_000, 40_001)]
    [1, 1, 2, 2, 4]
    """
    kept = 1
    while update > MAX_ROWS * kept:
        kept *= 2
    return kept


def csv_of(rows: Iterable[Mapping[str, float]]) -> bytes:
    """Rows as a file of their own."""
    texts = [{name: _text(value) for name, value in row.items()} for row in rows]
    return _encoded(texts, _ordered(name for row in texts for name in row))


def _encoded(rows: Iterable[Mapping[str, str]], columns: list[str]) -> bytes:
    return b"".join([_line(columns), *(_line(row.get(name, "") for name in columns) for row in rows)])


def _ordered(names: Iterable[str]) -> list[str]:
    """Each name once, in order of appearance, with `time/*` last."""
    unique = list(dict.fromkeys(names))
    return sorted(unique, key=lambda name: name.startswith("time/"))


def _text(value: float) -> str:
    return repr(int(value)) if isinstance(value, int) else repr(float(value))


def _line(cells: Iterable[str]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue().encode()
