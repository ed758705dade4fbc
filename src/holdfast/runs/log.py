"""The log of a run: `progress.csv`, TensorBoard events, Weights & Biases, `config.json`, `meta.json`.

The CSV is the record (`record.py`): two identical runs give identical files in all columns but `time/*`, which come last.
A full disk loses no row: rows wait in memory.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import json
import math
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.runs import record
from holdfast.runs.metadata import describe_process
from holdfast.runs.record import CSV_NAME, MAX_ROWS, Record, read_progress
from holdfast.runs.writing import RESCUE_PLACES, RetrySchedule, new_folder, rescue_folder, write_whole

__all__ = ["CSV_NAME", "MAX_ROWS", "RESULT_NAME", "RunFolderError", "RunLog", "read_progress", "write_json"]

RESULT_NAME = "result.json"


class RunFolderError(OSError):
    """A run's folder cannot be written when the run begins. (Later, rows wait in memory and training continues.)"""


class RunLog:
    """Writes the metrics of a run to every place that was asked for.

    A new log starts a new `progress.csv` at its first row. `rewind(update)` before the first row continues the existing
    one, cut back to that update. notify: shows the user a line. before_writing: raises OSError if the folder must not be
    written now.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        wandb: bool,
        config: Mapping[str, Any],
        notify: Callable[[str], None] = lambda text: None,
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._record = Record(self.folder, notify)
        self._before_writing = before_writing
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
        """One row; `step` is the x axis in TensorBoard (environment steps). True when writing starts to fail."""
        before = self.problem
        if int(row["update"]) % record.stride(row["update"]) == 0:
            self._waiting.append(row)
            self._write_waiting()
            if self._use_tensorboard:
                self._write_tensorboard(row, step)
        if self._use_wandb:
            self._write_wandb(row)
        return self.problem is not None and before is None

    def rewind(self, update: int, backup: Callable[[], Path] | None = None) -> None:
        """Continue the existing record from this update when the next row is written.

        Rows that are dropped then are moved to the folder that `backup` returns, by default a new one in the run's folder.
        """
        self._close_writers()
        rows = self._record.cut(update, backup or functools.cache(lambda: removed_folder(self.folder, update)))
        self._purge_step = int(float(rows[-1].get("steps") or update)) + 1 if rows else 0

    def close(self) -> Path | None:
        """Flush and close everything. If rows still wait, writes them elsewhere and returns that file.

        `num_waiting` rows are lost then, if no disk has room for them.
        """
        self._write_waiting()
        self._close_writers()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
        return self._put_elsewhere(record.csv_of(self._waiting)) if self._waiting else None

    @property
    def num_waiting(self) -> int:
        """Rows that are in memory only."""
        return len(self._waiting)

    # --- inside -----------------------------------------------------------------------------------------

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._before_writing()
                self._record.append(self._waiting[0])
                self._waiting.popleft()
            self.problem = None
        except OSError as error:
            self.problem = str(error)

    def _put_elsewhere(self, rows: bytes) -> Path | None:
        """Rows in a file of their own, where there is room; None if there is none."""
        for place in RESCUE_PLACES:
            with suppress(OSError):
                folder = rescue_folder(self.folder, place)
                try:
                    write_whole(folder / CSV_NAME, [rows])
                except OSError:
                    folder.rmdir()
                    raise
                self._waiting.clear()
                return folder / CSV_NAME
        return None

    def _write_tensorboard(self, row: Mapping[str, float], step: int) -> None:
        """The CSV is the record: rows that the disk refuses here are dropped, and retries become rarer."""
        update, problem = int(row["update"]), None
        if self._events is None and self._tensorboard_retry.must_wait(update):
            return
        try:
            removed = self._events is not None and not self._events.path.exists()
            if removed and self.problem is None:  # otherwise the folder may belong to another run now
                self._close_tensorboard()
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
            run_id = id_file.read_text().strip() if resumed and id_file.is_file() else ""
            if not re.fullmatch(r"[\w-]{1,64}", run_id):
                run_id = wandb.util.generate_id()
            write_whole(id_file, [run_id.encode()])
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
        self._record.close()
        self._close_tensorboard()

    def _close_tensorboard(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def removed_folder(run: Path, update: int) -> Path:
    """A new folder in the run's, for what a resumed run repeats."""
    return new_folder(run / f"removed_after_update_{update:08d}")


def write_metadata(folder: Path, config: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
    """`config.json`, the settings that `--config` reruns, and `meta.json`: versions, machine, and facts such as the engines used."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(config))
    write_json(folder / "meta.json", {**describe_process(), **(facts or {})})


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """`result.json`: the result of a finished run."""
    write_json(Path(folder) / RESULT_NAME, dict(result))


def write_json(path: Path, content: Any) -> None:
    """Atomically."""
    write_whole(path, [(json.dumps(content, indent=2) + "\n").encode()])


# --- event files -----------------------------------------------------------------------------------------------------
# TensorBoard event files, written immediately and by the calling thread.
#
# TensorBoard's own writer uses a background thread. On a full disk that thread dies with a traceback in the middle of the
# display, and the file ends in a torn record, after which nothing can be read. Here a full disk raises `OSError`.


_number = itertools.count()  # a process may open two files within one second


class EventFile:
    """One event file in `folder`. TensorBoard ignores what older files there hold for `purge_step` and later steps."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_number):06d}"
        self.path = folder / f"events.out.tfevents.{name}"
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115  (open until the run ends)
        self._has_points = False
        try:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))
        except OSError:
            self.close()
            raise

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of every finite number."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=n) for tag, n in numbers.items() if math.isfinite(n)]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._has_points = True

    def close(self) -> None:
        """Close the file, and remove it if it holds no points."""
        with suppress(OSError):  # a disk that fails; what it holds is not the record
            self._file.close()
        if not self._has_points:
            with suppress(OSError):
                self.path.unlink()

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        end, rest = self._file.seek(0, os.SEEK_END), memoryview(record.getvalue())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise
