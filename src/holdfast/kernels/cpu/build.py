"""Compiles the C sources in `c/` into one shared library, at first use or when a wheel is built.

The library holds the kernels once per instruction set and chooses between them when it is loaded, so it runs on any CPU
of its architecture. It is stored in the cache (`code_cache.py`) under a name derived from the sources, the flags and the
architecture. This file needs only the standard library, because the wheel build imports it outside the package.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
PREBUILT = SOURCES / "prebuilt.so"  # only in a wheel
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno"]
# Flags for compiling isa.c, by instruction set.
ISA_FLAGS = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma", "-DHOLDFAST_AVX2"],
    "avx512": ["-mavx512f", "-mfma", "-mprefer-vector-width=512", "-DHOLDFAST_AVX512"],
}


class BuildError(RuntimeError):
    """The library could not be built; the message says what to do."""


def isas() -> list[str]:
    """The instruction sets compiled for this architecture."""
    return list(ISA_FLAGS) if platform.machine().lower() in ("x86_64", "amd64") else ["plain"]


def key() -> str:
    """Identifies the library: the same sources, flags and architecture give the same key."""
    digest = hashlib.sha256(repr((FLAGS, ISA_FLAGS, platform.system(), platform.machine())).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> list[str] | None:
    """The C compiler's command: $CC, or the first of cc, gcc, clang on PATH."""
    if os.environ.get("CC"):
        command = shlex.split(os.environ["CC"])
        return command if shutil.which(command[0]) else None
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return None


def compile_library(target: Path, compiler: list[str]) -> None:
    """Compiles to `target`; it appears complete or not at all."""
    flags = [*FLAGS, f'-DHOLDFAST_KEY="{key()}"']
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        objects = compile_objects(Path(folder), [*compiler, *flags])
        library = str(Path(folder) / "library.so")
        _run_all([[*compiler, *flags, "-shared", *objects, "-o", library, "-lpthread", "-lm"]])
        os.replace(library, target)


def compile_objects(folder: Path, command: list[str]) -> list[str]:
    """The object files of the library, in `folder`: isa.c once per instruction set, every other source once."""
    sources = [("isa.c", [*ISA_FLAGS[isa], f"-DHOLDFAST_TABLE=holdfast_{isa}"]) for isa in isas()]
    sources += [(path.name, []) for path in sorted(SOURCES.glob("*.c")) if path.name != "isa.c"]
    objects = [str(folder / f"{number}.o") for number in range(len(sources))]
    _run_all([[*command, *own, "-c", source, "-o", out] for (source, own), out in zip(sources, objects)])
    return objects


def _run_all(commands: list[list[str]]) -> None:
    """Runs the commands in parallel."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": SOURCES}
    running = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    results = [(process.communicate()[0], process.returncode, process.args) for process in running]
    for output, code, command in results:
        if code:
            raise BuildError(f"`{shlex.join(command)}` failed with status {code}:\n{output.strip()[-2000:]}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def library_path() -> Path:
    """The library in the cache, built first if it is missing or damaged. Raises BuildError."""
    from holdfast.kernels import code_cache

    name = f"native-{key()}.so"
    try:
        found = code_cache.find(name)
        if found is not None:
            return found
        compiler = find_compiler()
        if compiler is None:
            wanted = f"CC={os.environ['CC']!r} is not" if os.environ.get("CC") else "none of cc, gcc, clang is"
            raise BuildError(f"no C compiler ({wanted} on PATH): install gcc or clang")
        target = code_cache.prepare() / name
        with _locked(target.parent / "build.lock"):
            if code_cache.find(name) is None:  # another process may have built it while this one waited
                logging.getLogger(__name__).info("compiling the native CPU kernel, once, into %s", target)
                compile_library(target, compiler)
                code_cache.seal(name)
    except code_cache.UntrustedCacheError as error:
        raise BuildError(str(error)) from error
    except OSError as error:
        where = code_cache.folder()
        raise BuildError(f"cannot build in {where} ({error}): set HOLDFAST_CACHE to another folder") from error
    return target
