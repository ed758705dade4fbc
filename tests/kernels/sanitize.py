"""Runs the native kernel's C driver under AddressSanitizer with UBSan, and under ThreadSanitizer: `make sanitize`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.kernels.cpu import build

TOOLS = {
    "address, undefined behavior": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread"],
}


def compile_driver(folder: Path, compiler: list[str], flags: list[str]) -> Path:
    """Kernel and driver as one program, with the flags of the real library except for the optimization level."""
    command = [*compiler, *build.FLAGS, "-O1", "-g", "-fno-omit-frame-pointer", *flags]
    objects = build.compile_objects(folder, command)
    program = folder / "sanitize"
    driver = [str(Path(__file__).with_suffix(".c")), f"-I{build.SOURCES}"]
    subprocess.run([*command, *driver, *objects, "-o", str(program), "-lm", "-lpthread"], check=True)
    return program


def main() -> int:
    compiler = build.find_compiler()
    if compiler is None:
        print("no C compiler: nothing to check", file=sys.stderr)
        return 1
    for name, flags in TOOLS.items():
        with tempfile.TemporaryDirectory() as folder:
            code = subprocess.run([str(compile_driver(Path(folder), compiler, flags))]).returncode
        print(f"{name}: {'clean' if code == 0 else f'failed with status {code}'}")
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
