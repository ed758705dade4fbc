"""Why a run stops before its end: Ctrl-C, a callback, a target reached. A signal on one rank stops all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from holdfast.distributed.ranks import Ranks

REASONS = ("callback", "target", "interrupt")


class StopSignal:
    """`reason`: one of REASONS, or None while the run continues."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def sync(self, ranks: Ranks, device: torch.device) -> bool:
        """Whether any rank has a reason to stop; all ranks then have it."""
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
