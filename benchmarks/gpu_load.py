"""How busy the GPU is while a program of any framework runs on it, as nvidia-smi reports it.

with GpuLoad() as load:
    ...
load.between(begin, end)  # {"gpu_busy": 0.97, "watts": 512.0}, of time.time() seconds

`gpu_busy` is NVML's "utilization.gpu": the share of time during which at least one kernel ran, whatever its size. Power is
the better measure of how much of the GPU those kernels used.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from typing import Any

COMMAND = "nvidia-smi --query-gpu=utilization.gpu,power.draw --format=csv,noheader,nounits --loop-ms=100 --id=0"
SETTLING = 0.7
"""Seconds left out at the beginning, because a reading is an average over the time before it."""


class GpuLoad:
    """Reads every 100 ms. Without nvidia-smi there are no readings."""

    def __init__(self) -> None:
        self._readings: list[tuple[float, float, float]] = []  # (clock, percent, watts)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GpuLoad:
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(COMMAND.split(), stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            try:
                percent, watts = map(float, line.split(","))
            except ValueError:  # "[N/A]"
                continue
            self._readings.append((time.time(), percent, watts))

    def between(self, begin: float, end: float) -> dict[str, float | None]:
        """Means over a window, without its first moments."""
        inside = [reading for reading in self._readings if begin + SETTLING <= reading[0] <= end]
        if not inside:
            return {"gpu_busy": None, "watts": None, "readings": 0}
        return {
            "gpu_busy": sum(reading[1] for reading in inside) / len(inside) / 100,
            "watts": sum(reading[2] for reading in inside) / len(inside),
            "readings": len(inside),
        }
