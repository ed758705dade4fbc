"""Which commit a result is of, for the JSON that a benchmark writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def this_commit() -> str:
    """The short hash of the tree that this file is in; `HOLDFAST_COMMIT`, or "unknown", where there is no git."""
    otherwise = os.environ.get("HOLDFAST_COMMIT", "unknown")
    try:
        shown = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return otherwise
    return shown.stdout.strip() or otherwise
