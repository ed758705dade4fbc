"""The exception that ends a process which was told to end. `training/stop_signal.py` raises it."""

from __future__ import annotations

import signal


class Terminated(SystemExit):
    """The process was told to end (SIGTERM), or its torchrun is gone; everything is saved."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)  # 143, as shells count
