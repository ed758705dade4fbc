"""Which commit a result is of, for the JSON that a benchmark writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def this_commit() -> str:
    """`HOLDFAST_COMMIT` where it is set, for a copy without git; else the short hash of the tree that this file is in, or "unknown"."""
    if named := os.environ.get("HOLDFAST_COMMIT"):
        return named
    try:
        shown = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return shown.stdout.strip() or "unknown"
