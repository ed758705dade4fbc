"""TOML, which Python reads itself since 3.11: the tables that the package keeps as data, and suites."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str) -> dict[str, Any]:
    """A ValueError says what is wrong with the text."""
    return tomllib.loads(text)


def read_toml(module_file: str, name: str) -> dict[str, Any]:
    """The table in the file `name` next to a module, which passes its `__file__`."""
    return parse_toml(Path(module_file).with_name(name).read_text(encoding="utf-8"))
