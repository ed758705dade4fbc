"""Installs a wheel into a clean environment and trains there, with no compiler on PATH: `make test-wheel`.

    python tests/wheel_install.py dist/holdfast-*.whl [--torch torch==2.13.0] [--seconds 90]

It checks that the compiled kernel is the wheel's, that nothing was compiled, and that the preset is solved. It prints the wall and
CPU seconds of each part, and of all parts but the installation of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

SOLVED = 0.9
KEPT = ("ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "PIP_FIND_LINKS",
        "PIP_CERT")  # fmt: skip

CHECK = """
import shutil, sys
from holdfast.kernels.cpu import build, library
import holdfast, torch
assert all(shutil.which(name) is None for name in ("cc", "gcc", "clang")), "there is a compiler on PATH"
found = library.load()
assert found.path == build.PREBUILT, f"the kernel is {found.path}, expected the wheel's ({found.reason})"
assert holdfast.__file__.startswith(sys.prefix), holdfast.__file__
print(f"holdfast {holdfast.__version__}, Python {sys.version.split()[0]}, torch {torch.__version__}, {found.isa}")
"""


class CleanEnvironment:
    """A folder with a virtual environment, an empty HOME and an empty PATH. Runs its Python, and measures."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "venv" / "bin" / "python"
        self.seconds = 0.0  # of the parts that count
        venv.create(folder / "venv", with_pip=True)
        (folder / "bin").mkdir()
        self.variables = {"PATH": str(folder / "bin"), "HOME": str(folder), "HOLDFAST_CACHE": str(folder / "cache")}
        self.variables |= {name: os.environ[name] for name in KEPT if name in os.environ}

    def run(self, *command: str | Path) -> str:
        words = [self.python, *command]
        done = subprocess.run(words, env=self.variables, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout.strip()

    def part(self, name: str, *command: str | Path, counts: bool = True) -> str:
        wall, cpu = time.monotonic(), _cpu_seconds()
        said = self.run(*command)
        wall, cpu = time.monotonic() - wall, _cpu_seconds() - cpu
        self.seconds += wall if counts else 0.0
        print(f"{name:22} {wall:6.1f} s wall {cpu:6.1f} s CPU", flush=True)
        return said


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs first")
    parser.add_argument("--packages", type=Path, help="a folder of installed packages instead of pip's, offline")
    parser.add_argument("--seconds", type=float, help="fail if all but installing torch takes longer")
    flags = parser.parse_args()
    print(f"{flags.wheel.name}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="holdfast-wheel-") as folder:
        clean = CleanEnvironment(Path(folder))
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        if flags.packages:
            site = Path(clean.run("-c", "import site; print(site.getsitepackages()[0])"))
            (site / "packages.pth").write_text(f"{flags.packages.resolve()}\n")
            clean.part("pip install the wheel", *pip, "--no-deps", "--force-reinstall", flags.wheel.resolve())
        else:
            clean.part("pip install torch", *pip, flags.torch, counts=False)
            clean.part("pip install the wheel", *pip, flags.wheel.resolve())
        versions = clean.part("first import", "-c", CHECK)
        train = ("-m", "holdfast", "train", "--preset", "repeat-previous-easy", "--quiet", "--run-dir", "run")
        said = clean.part("holdfast train", *train)
        print(versions, said.splitlines()[0], sep="\n")
        result = json.loads((clean.folder / "run" / "result.json").read_text())
        compiled = list((clean.folder / "cache").rglob("*.so"))
        assert not compiled, f"something was compiled: {compiled}"
        assert result["mean_return"] >= SOLVED, f"not solved: {result['mean_return']}"
        print(f"{clean.seconds:.1f} s without installing torch")
        if flags.seconds and clean.seconds > flags.seconds:
            sys.exit(f"that is more than {flags.seconds:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
