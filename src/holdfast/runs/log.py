"""The record of a run: `progress.csv`, TensorBoard events, Weights & Biases, `config.json`, `meta.json`.

The CSV is the record. One row per update, floats written so that they read back to the same bits: two
identical runs give identical files in all columns but `time/*`, which come last. Each row goes to the operating
system at once, so a killed run loses at most the row being written. A full disk loses none: rows wait in memory. The
record of a long run is thinned out to at most MAX_ROWS rows.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from holdfast.runs.metadata import describe_process
from holdfast.runs.retry_schedule import RetrySchedule
from holdfast.runs.tensorboard import EventFile

CSV_NAME = "progress.csv"
RESULT_NAME = "result.json"
MAX_ROWS = 20_000
"""A run of more updates keeps every second row, then every fourth, ..."""


class RunFolderError(OSError):
    """A run's folder cannot be written when the run begins. (Later, rows wait in memory and training continues.)"""


class RunLog:
    """Writes the metrics of a run to every place that was asked for.

    A new log begins a new `progress.csv` at its first row. `rewind(update)` before the first row continues
    the one that is there, cut back to that update.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, wandb: bool, config: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._csv_path = self.folder / CSV_NAME
        self._columns: list[str] = []
        self._stride = 1  # of the rows in the file
        self._file: IO[bytes] | None = None
        self._waiting: deque[Mapping[str, float]] = deque(maxlen=MAX_ROWS)  # rows that could not be written yet
        self.problem: str | None = None
        """Why rows wait in memory; None when all is written."""
        self._use_tensorboard = tensorboard
        self._purge_step: int | None = None
        self._events: EventFile | None = None
        self._tensorboard_retry = RetrySchedule(lambda text: None)
        self._use_wandb = wandb
        self._wandb: Any = None
        self._config = dict(config)
        if wandb and importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError("--track needs Weights & Biases: pip install wandb, or leave --track out")

    def write(self, row: Mapping[str, float], step: int) -> bool:
        """One row; `step` is the x axis in TensorBoard (environment steps). True when the disk begins to refuse."""
        before = self.problem
        if int(row["update"]) % stride(row["update"]) == 0:
            self._waiting.append(row)
            self._write_waiting()
            if self._use_tensorboard:
                self._write_tensorboard(row, step)
        if self._use_wandb:
            self._write_wandb(row)
        return self.problem is not None and before is None

    def rewind(self, update: int) -> None:
        """Cut `progress.csv` back to the rows with `update` at most this, and drop a torn last line."""
        self._close_writers()
        rows = [row for row in read_progress(self.folder) if float(row["update"]) <= update]
        # Columns that only later rows have are dropped too: the file is what it was at that update.
        self._columns = _ordered(name for row in rows for name, text in row.items() if text != "")
        self._stride = stride(update)
        if rows:
            self._replace_csv(rows, self._columns)
        else:
            self._csv_path.unlink(missing_ok=True)
        self._purge_step = int(float(rows[-1].get("steps") or update)) + 1 if rows else 0

    def close(self) -> Path | None:
        """Flush and close everything. Where rows went that the folder could not take to the last, if there are any."""
        self._write_waiting()
        self._close_writers()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
        return self._put_elsewhere() if self._waiting else None

    # --- inside -----------------------------------------------------------------------------------------

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._write_csv(self._waiting[0])
                self._waiting.popleft()
            self.problem = None
        except OSError as error:
            self.problem = str(error)

    def _put_elsewhere(self) -> Path | None:
        """The rows that wait, under columns of their own, in the system's temporary folder; None if that is full too."""
        path = Path(tempfile.gettempdir()) / f"holdfast-{self.folder.name}-{CSV_NAME}"
        columns = _ordered(name for row in self._waiting for name in row)
        lines = [_line(_text(row[name]) if name in row else "" for name in columns) for row in self._waiting]
        try:
            path.write_text("".join([_line(columns), *lines]))
        except OSError:
            return None
        self._waiting.clear()
        return path

    def _write_csv(self, row: Mapping[str, float]) -> None:
        columns = _ordered([*self._columns, *row])
        update = row["update"]
        if columns != self._columns or stride(update) > self._stride:
            earlier = read_progress(self.folder) if self._columns else []
            kept = [old for old in earlier if int(float(old["update"])) % stride(update) == 0]
            self._replace_csv(kept, columns)
            self._stride = stride(update)
        if self._file is None:
            self._file = open(self._csv_path, "ab", buffering=0)  # noqa: SIM115  (kept open over the run)
        end = self._file.seek(0, os.SEEK_END)
        rest = memoryview(_line(_text(row[name]) if name in row else "" for name in self._columns).encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)  # no torn line in the middle of the record
            raise

    def _replace_csv(self, rows: Iterable[Mapping[str, str]], columns: list[str]) -> None:
        """Rewrite the whole file with these columns; a reader sees the old file or the new one."""
        if self._file is not None:
            self._file.close()
            self._file = None
        temporary = self._csv_path.with_suffix(".csv.new")
        try:
            with open(temporary, "w", newline="") as file:
                file.write(_line(columns))
                file.writelines(_line(row.get(name, "") for name in columns) for row in rows)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._csv_path)
        finally:
            temporary.unlink(missing_ok=True)
        self._columns = columns

    def _write_tensorboard(self, row: Mapping[str, float], step: int) -> None:
        """The CSV is the record: rows that the disk refuses here are dropped, and retries become rarer."""
        update, problem = int(row["update"]), None
        if self._events is None and self._tensorboard_retry.must_wait(update):
            return
        try:
            if self._events is None:
                self._events = EventFile(self.folder, self._purge_step or 0)
            self._events.add(row, step)
        except ImportError:
            self._use_tensorboard = False
        except OSError as error:
            problem = str(error)
            self._close_tensorboard()
            self._purge_step = step
        self._tensorboard_retry.record(problem, update)

    def _write_wandb(self, row: Mapping[str, float]) -> None:
        if self._wandb is None:
            import wandb

            resumed = self._purge_step is not None
            id_file = self.folder / "wandb_id"
            run_id = id_file.read_text().strip() if resumed and id_file.exists() else wandb.util.generate_id()
            id_file.write_text(run_id)
            self._wandb = wandb.init(
                project="holdfast",
                name="/".join(self.folder.parts[-2:]),
                id=run_id,
                resume="allow",
                dir=str(self.folder),
                config=self._config,
            )
        # After a resume the repeated updates are already there, with the same numbers; W&B keeps those.
        self._wandb.log(dict(row), step=int(row["update"]))

    def _close_writers(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._close_tensorboard()

    def _close_tensorboard(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def stride(update: float) -> int:
    """A run of so many updates keeps every n-th row: n.

    >>> [stride(update) for update in (1, 20_000, 20_001, 40_000, 40_001)]
    [1, 1, 2, 2, 4]
    """
    kept = 1
    while update > MAX_ROWS * kept:
        kept *= 2
    return kept


def read_progress(run: str | Path) -> list[dict[str, str]]:
    """The rows of a run's `progress.csv` as text, a torn last line left out; none without a file."""
    path = Path(run) / CSV_NAME
    if not path.exists():
        return []
    text = path.read_text()
    whole_lines = text[: text.rfind("\n") + 1]
    reader = csv.reader(io.StringIO(whole_lines, newline=""))
    columns = next(reader, [])
    return [dict(zip(columns, cells)) for cells in reader if len(cells) == len(columns)]


def write_metadata(folder: Path, config: Mapping[str, Any], engines: Mapping[str, str] | None = None) -> None:
    """`config.json`, the settings that `--config` reruns, and `meta.json`: versions, machine, and the engines used."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(config))
    write_json(folder / "meta.json", {**describe_process(), "engines": dict(engines or {})})


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """`result.json`: the result of a finished run."""
    write_json(Path(folder) / RESULT_NAME, dict(result))


def _ordered(names: Iterable[str]) -> list[str]:
    """Each name once, in order of appearance, with `time/*` last."""
    unique = list(dict.fromkeys(names))
    return sorted(unique, key=lambda name: name.startswith("time/"))


def _text(value: float) -> str:
    return repr(int(value)) if isinstance(value, int) else repr(float(value))


def _line(cells: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def write_json(path: Path, content: Any) -> None:
    """Atomically."""
    temporary = path.with_suffix(".json.new")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
