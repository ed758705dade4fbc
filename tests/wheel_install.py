"""Installs a wheel into a clean environment and trains there, with no compiler on PATH: `make test-wheel`.

    python tests/wheel_install.py dist/holdfast-*.whl [--torch torch==2.13.0] [--seconds 90]

It checks that the compiled kernel is the wheel's, that nothing was compiled, and that the preset is solved. It prints how long
everything but the installation of torch took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

SOLVED = 0.9

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs first")
    parser.add_argument(
        "--packages", type=Path, help="a folder of installed packages to use in place of pip's, offline"
    )
    parser.add_argument("--seconds", type=float, help="fail if installing the wheel and training take longer")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-wheel-") as text:
        folder = Path(text)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        (folder / "bin").mkdir()  # PATH: nothing at all
        environment = {"PATH": str(folder / "bin"), "HOME": text, "HOLDFAST_CACHE": str(folder / "cache")}
        kept = (
            "ONEDNN_MAX_CPU_ISA",
            "OMP_NUM_THREADS",
            "PIP_INDEX_URL",
            "PIP_EXTRA_INDEX_URL",
            "PIP_CONFIG_FILE",
            "PIP_FIND_LINKS",
        )
        environment |= {name: os.environ[name] for name in kept if name in os.environ}

        def run(*command: str | Path) -> str:
            done = subprocess.run([python, *command], env=environment, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
            return done.stdout

        options: list[str | Path] = ["--quiet", "--disable-pip-version-check"]
        if flags.packages:
            site = Path(run("-c", "import site; print(site.getsitepackages()[0])").strip())
            (site / "packages.pth").write_text(f"{flags.packages.resolve()}\n")
            options.append("--no-deps")
        else:
            run("-m", "pip", "install", *options, flags.torch)
        before = time.monotonic()
        run(
            "-m",
            "pip",
            "install",
            *options,
            "--force-reinstall" if flags.packages else "--upgrade",
            flags.wheel.resolve(),
        )
        installed = time.monotonic()
        print(run("-c", CHECK).strip())
        print(run("-m", "holdfast", "train", "--preset", "repeat-previous-easy", "--quiet", "--run-dir", "run").strip())
        done = time.monotonic()
        result = json.loads((folder / "run" / "result.json").read_text())
        compiled = list((folder / "cache").glob("native-*")) if (folder / "cache").exists() else []
        assert not compiled, f"something was compiled: {compiled}"
        assert result["mean_return"] >= SOLVED, f"not solved: {result['mean_return']}"
        print(f"installed in {installed - before:.1f} s, imported and trained in {done - installed:.1f} s")
        if flags.seconds and done - before > flags.seconds:
            sys.exit(f"that is more than {flags.seconds:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
