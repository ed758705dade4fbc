"""Why a run stops before its end: Ctrl-C, SIGTERM, a callback, a target reached. A signal on one rank stops all."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from holdfast.distributed.processes import Terminated
from holdfast.distributed.ranks import Ranks, launcher

REASONS = ("callback", "target", "interrupt", "SIGTERM", "the end of torchrun")


class StopSignal:
    """`reason`: one of REASONS, or None while the run continues."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._launcher = launcher()
        self._all_is_saved = False

    @property
    def terminated(self) -> bool:
        """Whether the process should end now, without a final evaluation."""
        return self.reason in REASONS[3:]

    def sync(self, ranks: Ranks, device: torch.device) -> bool:
        """Whether any rank has a reason to stop; all ranks then have it."""
        if self.reason is None and launcher() != self._launcher:
            self.reason = "the end of torchrun"  # an orphan would train on unseen, next to the job that replaces it
        mine = 0 if self.reason is None else 1 + REASONS.index(self.reason)
        found = int(max(number for (number,) in ranks.all_gather([float(mine)], device)))
        if found:  # else a Ctrl-C during the exchange is kept for the next one
            self.reason = REASONS[found - 1]
        return found > 0

    @contextmanager
    def on_ctrl_c(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Ctrl-C stops after the current update, a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            if self.reason == "interrupt":
                raise KeyboardInterrupt
            self.reason = "interrupt"
            with suppress(RuntimeError, ImportError):  # the signal may come in the middle of a print, or of its imports
                notify("stopping after this update; Ctrl-C again to stop at once")

        previous = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def end_at_once(self) -> None:
        """All is saved: a SIGTERM, from now on or already received, raises `Terminated` here and now."""
        self._all_is_saved = True
        if self.terminated:
            raise Terminated

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """SIGTERM stops after the current update, as the first Ctrl-C does. A handler of the user's own stays."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        process = os.getpid()

        def stop(*_: Any) -> None:
            if os.getpid() != process:  # a forked process, such as an environment's, ends as it would without us
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            self.reason = "SIGTERM"
            if self._all_is_saved:
                raise Terminated

        self._all_is_saved = False
        signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
