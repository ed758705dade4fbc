"""Facts about this process, machine and installation, for the `meta.json` of a run. It writes no file itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

REQUIRED = ("holdfast", "torch", "numpy", "gymnasium", "tensordict", "tyro", "rich")
# Optional packages and what they are for.
OPTIONAL = {
    "tensorboard": "event files; pip install 'holdfast[tensorboard]'",
    "matplotlib": "plots; pip install 'holdfast[plot]'",
    "popgym": "POPGym's environments; pip install 'holdfast[popgym]'",
    "pettingzoo": "PettingZoo's games; pip install 'holdfast[pettingzoo]'",
    "envpool": "EnvPool's environments; pip install envpool",
    "sb3-contrib": "Stable-Baselines3; pip install 'holdfast[sb3]'",
    "torchrl": "TorchRL; pip install 'holdfast[torchrl]'",
    "onnx": "export to ONNX; pip install 'holdfast[onnx]'",
    "triton": "GPU kernels; comes with torch's CUDA builds",
    "wandb": "--track; pip install wandb",
}


def describe_process() -> dict[str, Any]:
    """Versions, processor, devices, git commit and command line of this process, as plain data."""
    import torch

    return {
        "command": sys.argv,
        "git": git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "devices": device_names(),
        "packages": package_versions((*REQUIRED, *OPTIONAL)),
    }


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The installed ones among `names`, with their versions."""
    from holdfast import __version__

    versions = {}
    for name in names:
        try:
            versions[name] = __version__ if name == "holdfast" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_names() -> list[str]:
    """Accelerators that torch can use."""
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("Apple GPU (mps)")
    return names


def git_state() -> dict[str, Any] | None:
    """Commit of the current folder and whether tracked files have changed; None outside a repository."""

    def git(*arguments: str) -> str:
        call = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
        return call.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
