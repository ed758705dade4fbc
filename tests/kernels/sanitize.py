"""The C code under tools that check memory, undefined behavior and threads: `make sanitize`.

1. A driver in C calls every function that Python can call, over odd and random sizes, with arrays of exactly the size
   that is needed: under AddressSanitizer with UBSan, then under ThreadSanitizer.
2. Mutants of checkpoints (tests/checkpoint_mutants.py) are loaded and resumed with the library compiled for
   AddressSanitizer: what comes from a file must not reach memory that is not its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.kernels.cpu import build

sys.path.insert(0, str(Path(__file__).parents[1]))

TOOLS = {
    "address, undefined behavior": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread"],
}
DRIVER = Path(__file__).with_suffix(".c")


def functions_not_driven() -> list[str]:
    """Functions that Python can call and the driver does not."""
    sources = "\n".join(path.read_text() for path in sorted(build.SOURCES.glob("*.c")))
    exported = re.findall(r"^EXPORT .*?(holdfast_\w+)\(", sources, re.M)
    driver = DRIVER.read_text()
    calls = {name for name in exported if re.search(rf"(succeed|refuse|if)\b.*{name}\(|= .*{name}\(", driver)}
    return [name for name in exported if name not in calls and name != "holdfast_key"]


def compile_driver(folder: Path, compiler: list[str], flags: list[str]) -> Path:
    """Kernel and driver as one program, with the flags of the real library except for the optimization level."""
    command = [*compiler, *build.FLAGS, "-O1", "-g", "-fno-omit-frame-pointer", *flags]
    objects = build.compile_objects(folder, command)
    program = folder / "sanitize"
    driver = [str(DRIVER), f"-I{build.SOURCES}"]
    subprocess.run([*command, *driver, *objects, "-o", str(program), "-lm", "-lpthread"], check=True)
    return program


def drive(compiler: list[str], seed: int, count: int) -> int:
    for name, flags in TOOLS.items():
        with tempfile.TemporaryDirectory() as folder:
            program = compile_driver(Path(folder), compiler, flags)
            code = subprocess.run([str(program), str(seed), str(count)]).returncode
        print(f"{name}: {'clean' if code == 0 else f'failed with status {code}'}", flush=True)
        if code:
            return code
    return 0


def hunt_mutants(compiler: list[str], seed: int, count: int) -> int:
    """Mutants of checkpoints, with the library compiled for AddressSanitizer in a Python that is not."""
    from checkpoint_mutants import hunt

    found, cpp = (
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    )
    if not Path(found).is_absolute():
        print("mutants of checkpoints: skipped, the compiler has no libasan.so (clang links it into programs only)")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler, "-fsanitize=address", "-fno-omit-frame-pointer", "-g"]
        chosen = {"CC": " ".join(command), "HOLDFAST_CACHE": folder, "HOLDFAST_CPU_KERNEL": "native"}
        path = "from holdfast.kernels.cpu import build; build.library_path()"
        subprocess.run([sys.executable, "-c", path], env={**os.environ, **chosen}, check=True)
        # Python's own allocations are not freed at exit; torch's allocator is the C library's, so tensors are watched.
        # The C++ library is there from the start, because AddressSanitizer looks for its __cxa_throw then, and aborts at
        # the first exception that torch throws if there was none.
        watched = {"LD_PRELOAD": f"{found}:{cpp}", "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"}
        outcomes, failures = hunt(count, seed, {**chosen, **watched})
    summary = ", ".join(f"{name} {times}" for name, times in sorted(outcomes.items()))
    print(f"mutants of checkpoints, seed {seed}: {summary}")
    print("\n".join(failures))
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the random sizes and the mutants")
    parser.add_argument("--calls", type=int, default=50, help="random calls per function and instruction set")
    parser.add_argument("--mutants", type=int, default=300, help="mutants of checkpoints; 0 for none")
    options = parser.parse_args()
    compiler = build.find_compiler()
    if compiler is None:
        print("no C compiler: nothing to check", file=sys.stderr)
        return 1
    if missing := functions_not_driven():
        print(f"{DRIVER} does not call {', '.join(missing)}", file=sys.stderr)
        return 1
    code = drive(compiler, options.seed, options.calls)
    return code or (hunt_mutants(compiler, options.seed, options.mutants) if options.mutants else 0)


if __name__ == "__main__":
    sys.exit(main())
