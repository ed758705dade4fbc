"""Puts the compiled CPU kernel into the wheel, if the machine that builds the wheel has a C compiler.

Without a compiler, or with `HOLDFAST_CPU_KERNEL=portable`, the wheel is pure Python and the kernel is compiled at first
use. An editable install never contains a compiled kernel, because its sources may change.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernelHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("HOLDFAST_CPU_KERNEL") == "portable":
            return
        native_build = self._load("src/holdfast/kernels/cpu/build.py")
        compiler = native_build.find_compiler()
        if compiler is None:
            self.app.display_warning("no C compiler found: the wheel will not contain the compiled CPU kernel")
            return
        library = Path(self.root) / "build" / native_build.PREBUILT.name
        library.parent.mkdir(exist_ok=True)
        native_build.compile_library(
            library, [*compiler, "-include", str(Path(self.root) / "packaging" / "glibc_2_28.h")]
        )
        build_data["force_include"][str(library)] = f"holdfast/kernels/cpu/c/{library.name}"
        build_data["pure_python"] = False
        # The library does not use Python's C API, so the wheel fits any Python 3 on this platform.
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def _load(self, path: str) -> Any:
        """Load a file as a module, without importing the package and, with it, torch."""
        spec = importlib.util.spec_from_file_location("native_build", Path(self.root) / path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
