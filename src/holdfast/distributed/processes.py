"""Python child processes of a command: started, listened to, told to stop, reaped. `train --seeds`, `sweep` and `bench` use it.

    with Processes() as processes:
        processes.start(["-m", "holdfast", "train"])
        child, line = processes.next(timeout=1.0)

However the block ends, its children are stopped by SIGTERM, at which a trainer saves and ends. SIGTERM to this process raises
`Terminated` in the block, as Ctrl-C raises KeyboardInterrupt. Nothing here knows what the children do.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from subprocess import Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import Any

# --- termination -----------------------------------------------------------------------------------------------------
# The exception that ends a process which was told to end. `training/stop_signal.py` raises it.


class Terminated(SystemExit):
    """The process was told to end (SIGTERM), or its torchrun is gone; everything is saved."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)  # 143, as shells count


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Child(Popen[str]):
    """A child process. Its output goes into files, so that no pipe fills up. With stdout=PIPE, `Processes.next` gives its lines."""

    def __init__(self, number: int, arguments: Sequence[str], **options: Any) -> None:
        self.number = number  # 1 for the first
        self._files = {name: TemporaryFile("w+", errors="replace") for name in ("stdout", "stderr")}  # noqa: SIM115
        # A command that is started as `holdfast` does not look for modules in the current folder, and neither do its children.
        safe = ["-P"] if sys.version_info >= (3, 11) and not {"", os.getcwd()} & set(sys.path) else []
        super().__init__([sys.executable, *safe, *arguments], text=True, errors="replace", **{**self._files, **options})

    def send(self, line: str) -> None:
        """To its standard input, which is a pipe."""
        with suppress(OSError):  # `Processes.next` says that it has ended
            print(line, file=self.stdin, flush=True)

    def end_input(self) -> None:
        if self.stdin is not None:
            with suppress(OSError):
                self.stdin.close()

    def reap(self) -> tuple[str, str, str]:
        """How it ended ("exit code 1", "signal SIGKILL"), what it wrote, and the last line of its standard error."""
        code = self.wait()
        self.end_input()
        for file in self._files.values():
            file.seek(0)
        output, errors = (file.read() for file in self._files.values())
        # Indented lines quote code, as warnings do.
        lines = [line for line in errors.splitlines() if line.strip() and not line[0].isspace()]
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ended, output, lines[-1] if lines else ""


class Processes:
    """The children of a `with` block. seconds_to_stop: how long they may take to stop, before they are killed."""

    def __init__(self, seconds_to_stop: float = math.inf) -> None:
        self.seconds_to_stop = seconds_to_stop
        self._children: list[Child] = []
        self._lines: queue.SimpleQueue[tuple[Child, str | None]] = queue.SimpleQueue()  # a signal does it no harm
        self._started, self._starting, self._terminated = 0, False, False
        self._handler: Any = None

    def __enter__(self) -> Processes:
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self.stop()
        finally:
            if self._handler is not None:
                signal.signal(signal.SIGTERM, self._handler)

    def _on_sigterm(self, *_: Any) -> None:
        self._terminated = True
        if not self._starting:
            raise Terminated

    def start(self, arguments: Sequence[str], **options: Any) -> Child:
        """arguments: those of Python. options: those of `Popen`."""
        self._started += 1
        self._starting = True  # SIGTERM waits: it would leave a child that nobody knows
        self._children.append(child := Child(self._started, arguments, **options))
        self._starting = False
        if self._terminated:
            raise Terminated
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        return child

    def _listen(self, child: Child) -> None:
        for line in child.stdout or ():
            if line.endswith("\n"):  # otherwise it was killed while it wrote
                self._lines.put((child, line))
        child.wait()
        self._lines.put((child, None))

    def next(self, timeout: float) -> tuple[Child | None, str | None]:
        """A child and its next line; None instead of a line if it has ended. Two None: nothing happened for `timeout` seconds."""
        try:
            child, line = self._lines.get(timeout=timeout)
        except queue.Empty:
            return None, None
        if line is None:
            self._children.remove(child)
        return child, line

    def wait(self, seconds: float = math.inf) -> None:
        """Until all children have ended, or for so many seconds."""
        end = time.monotonic() + seconds
        for child in self._children:
            with suppress(TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """Tell all children to stop, and wait until they have."""
        for child in self._children:
            if child.stdin is None or not child.stdin.closed:  # otherwise it ends by itself
                child.terminate()
        self.wait(self.seconds_to_stop)
        for child in self._children:
            child.kill()
            child.wait()
            child.end_input()
