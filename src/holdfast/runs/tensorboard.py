"""TensorBoard event files, written immediately and by the calling thread.

TensorBoard's own writer uses a background thread. On a full disk that thread dies with a traceback in the middle of the
display, and the file ends in a torn record, after which nothing can be read. Here a full disk raises `OSError`.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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
