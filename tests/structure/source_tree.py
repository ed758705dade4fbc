"""The source files of the package and their syntax trees, for the tests in this folder."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "holdfast"


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module, by its path inside the package: "policies/base.py"."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(), str(file)) for file in files}
