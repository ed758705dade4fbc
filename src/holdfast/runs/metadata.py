"""Facts about this process, machine and installation, for the `meta.json` of a run. It writes no file itself."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from holdfast.shown_text import without_password

REQUIRED = ("holdfast", "torch", "numpy", "gymnasium", "tyro", "rich")
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
# Optional packages and what they are for.
OPTIONAL = {
    "tensorboard": "event files; pip install 'holdfast[tensorboard]'",
    "matplotlib": "plots; pip install 'holdfast[plot]'",
    "popgym": "POPGym's environments; pip install 'holdfast[popgym]'",
    "pettingzoo": "PettingZoo's games; pip install 'holdfast[pettingzoo]'",
    "envpool": "EnvPool's environments; pip install envpool",
    "sb3-contrib": "Stable-Baselines3; pip install 'holdfast[sb3]'",
    "tensordict": "TensorDict policies; pip install 'holdfast[tensordict]'",
    "torchrl": "TorchRL; pip install 'holdfast[torchrl]'",
    "huggingface_hub": "hub:user/name; pip install 'holdfast[hub]'",
    "optuna": "holdfast sweep; pip install 'holdfast[sweep]'",
    "onnx": "export to ONNX; pip install 'holdfast[onnx]'",
    "triton": "GPU kernels; comes with torch's CUDA builds",
    "wandb": "--track; pip install wandb",
}


def describe_process() -> dict[str, Any]:
    """Versions, processor, devices, git commit and command line of this process, as plain data."""
    import torch

    return {
        "command": [without_password(argument) for argument in sys.argv],
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
    """Commit of the repository around the current folder; None outside one.

    It is read from the files: git itself would run programs that a repository's settings name (fsmonitor, filters). So
    whether files have changed since the commit is not known, and "changed" is None.
    """
    try:
        git = _git_folder(Path.cwd())
        commit = None if git is None else _commit(git)
    except (OSError, ValueError):
        return None
    return None if commit is None else {"commit": commit, "changed": None}


def _git_folder(start: Path) -> Path | None:
    ceilings = {Path(path) for path in os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep) if path}
    for folder in (start, *start.parents):
        if folder in ceilings and folder != start:
            return None
        git = folder / ".git"
        if git.is_dir():
            return git
        if git.is_file():  # a work tree or a submodule
            return folder / _first_line(git).removeprefix("gitdir: ")
    return None


def _commit(git: Path) -> str | None:
    head = _first_line(git / "HEAD")
    if not head.startswith("ref: "):
        return head if _HASH.fullmatch(head) else None
    ref = head.removeprefix("ref: ")
    if not ref.startswith("refs/") or ".." in ref:
        return None
    shared = git / _first_line(git / "commondir") if (git / "commondir").is_file() else git
    for folder in (git, shared):
        if (folder / ref).is_file():
            found = _first_line(folder / ref)
            return found if _HASH.fullmatch(found) else None
    packed = (shared / "packed-refs").read_text(errors="replace") if (shared / "packed-refs").is_file() else ""
    found = next((line.partition(" ")[0] for line in packed.splitlines() if line.endswith(f" {ref}")), "")
    return found if _HASH.fullmatch(found) else None


def _first_line(path: Path) -> str:
    if not path.is_file():  # a pipe would wait for ever
        raise FileNotFoundError(path)
    with path.open(errors="replace") as file:
        return file.readline(4096).strip()
