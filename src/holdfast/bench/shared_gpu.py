"""How worker processes share a device: one CPU thread each, and on request NVIDIA's MPS on a GPU.

Without MPS the kernels of different processes take turns on a GPU. An MPS server lets them run at the same time. It is started
for the time of a bench if the machine has one and it works; otherwise the workers do without it.
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

_QUIET: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
# A server that started may still refuse its first client, so one is tried, with the driver alone: torch takes seconds to load.
_FIRST_CLIENT = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
raise SystemExit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSynchronize() % 201)
"""


@contextmanager
def shared_gpu(device: str, mps: bool) -> Iterator[dict[str, str]]:
    """The environment variables of worker processes. mps: inside, an MPS server runs, if this is a GPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    control = shutil.which("nvidia-cuda-mps-control")
    running = "CUDA_MPS_PIPE_DIRECTORY" in environment  # a server of the user's own
    if device == "cpu" or not mps or control is None or running:
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
