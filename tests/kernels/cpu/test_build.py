"""How the native kernel is built: once, cached, shared by processes, and replaced by the portable one if that fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from holdfast.kernels.cpu import build, library
from holdfast.kernels.cpu import recurrence as native

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler on PATH")

# Imports two files instead of the package, without torch, so that a process starts quickly.
BUILD = """
import sys, types
for name in ("holdfast", "holdfast.kernels", "holdfast.kernels.cpu"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from holdfast.kernels.cpu import build
print(build.library_path())
"""
SOURCE = str(Path(build.__file__).parents[3])

RUN = """
import torch, holdfast as hf
from holdfast.kernels.cpu import recurrence as native
x, resets = torch.randn(5, 3, 4), torch.rand(5, 3) < 0.3
for _ in range(2):
    hf.LSTM(4, 6)(x, None, resets)[0].sum().backward()
    hf.GRU(4, 6)(x, None, resets)
print(native.status())
"""


def python(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_") and k != "CC"} | variables
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


@needs_compiler
def test_processes_that_start_together_build_one_library(tmp_path: Path) -> None:
    environment = os.environ | {"HOLDFAST_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", BUILD, SOURCE]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(paths) == 1 and Path(paths.pop()).stat().st_size > 0
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".lock", ".sha256", ".so"]


def test_without_a_compiler_the_portable_kernel_runs_and_one_line_says_so(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "HOLDFAST_CACHE": str(tmp_path / "cache")}
    done = python(RUN, **nothing)
    assert done.returncode == 0, done.stderr
    assert "'kernel': 'portable'" in done.stdout and "no C compiler" in done.stdout
    assert done.stderr.count("portable kernel") == 1 and "install gcc or clang" in done.stderr


def test_without_a_compiler_the_variable_silences_that_line_or_makes_it_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    library.load.cache_clear()
    try:
        monkeypatch.setenv("HOLDFAST_CPU_KERNEL", "portable")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not native.in_use()
        monkeypatch.setenv("HOLDFAST_CPU_KERNEL", "native")
        with pytest.raises(
            RuntimeError, match="HOLDFAST_CPU_KERNEL=native, but there is no native kernel: no C compiler"
        ):
            native.in_use()
    finally:
        library.load.cache_clear()


@needs_compiler
def test_an_instruction_set_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CPU_ISA", "mmx")
    monkeypatch.delenv("HOLDFAST_CPU_KERNEL", raising=False)
    library.load.cache_clear()
    try:
        status = native.status()
    finally:
        library.load.cache_clear()
    assert status["kernel"] == "portable" and "HOLDFAST_CPU_ISA='mmx'" in str(status["reason"])


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho no such target >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match=r"broken-cc(.|\n)*status 3(.|\n)*no such target"):
        build.library_path()
    assert not list((tmp_path / "cache").glob("*.so"))


@needs_compiler
def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(build.BuildError, match="set HOLDFAST_CACHE"):
        build.library_path()


def test_a_change_in_the_sources_asks_for_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.key()
    shutil.copytree(build.SOURCES, tmp_path / "native")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
    assert build.key() == before
    with (tmp_path / "native" / "step.h").open("a") as source:
        source.write("\n")
    assert build.key() != before


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "no digest"])
def test_a_damaged_library_is_built_again_and_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    built: list[Path] = []

    def quick(target: Path, compiler: list[str]) -> None:
        target.write_bytes(b"library" * 1000)
        built.append(target)

    monkeypatch.setattr(build, "compile_library", quick)
    path = build.library_path()
    assert build.library_path() == path and len(built) == 1
    whole = path.read_bytes()
    if damage == "no digest":
        path.with_name(path.name + ".sha256").unlink()
    else:
        path.write_bytes({"truncated": whole[:4000], "empty": b"", "flipped": b"L" + whole[1:]}[damage])
    assert build.library_path() == path and len(built) == 2 and path.read_bytes() == whole


@needs_compiler
def test_a_truncated_library_does_not_end_the_process(tmp_path: Path) -> None:
    built = library.load().path
    assert built is not None
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / built.name).write_bytes(built.read_bytes()[:5000])
    done = python(RUN, PATH=str(tmp_path), HOLDFAST_CACHE=str(tmp_path / "cache"))  # without a compiler
    assert done.returncode == 0 and "'kernel': 'portable'" in done.stdout, done.stderr
