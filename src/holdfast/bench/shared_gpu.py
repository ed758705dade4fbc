"""How worker processes share a device: one CPU thread each, and NVIDIA's MPS on a GPU.

Without MPS the kernels of different processes take turns on a GPU. An MPS server lets them run at the same time. It is started
for the time of a bench where the machine has one and it works, and the workers do without it otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SWITCH = "HOLDFAST_MPS"
"""Set this environment variable to 0 to do without MPS."""
_QUIET: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
# A server that started may still refuse its first client, so one is tried, with the driver alone: torch takes seconds to load.
_FIRST_CLIENT = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
raise SystemExit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSynchronize() % 201)
"""


@contextmanager
def shared_gpu(device: str, processes: int) -> Iterator[dict[str, str]]:
    """The environment variables of worker processes; inside, an MPS server runs if several of them share a GPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if device == "cpu":
        yield environment
        return
    control = shutil.which("nvidia-cuda-mps-control")
    unwanted = processes < 2 or environment.get(SWITCH) == "0" or "CUDA_MPS_PIPE_DIRECTORY" in environment
    if control is None or unwanted:
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-mps-", ignore_cleanup_errors=True) as folder:
        shared = {**environment, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = subprocess.run([control, "-d"], env=shared, **_QUIET).returncode == 0
        try:
            yield shared if started and _serves(shared) else environment
        finally:
            if started:
                subprocess.run([control], input="quit\n", env=shared, **_QUIET)


def _serves(environment: dict[str, str]) -> bool:
    try:
        return (
            subprocess.run([sys.executable, "-c", _FIRST_CLIENT], env=environment, timeout=20, **_QUIET).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False
