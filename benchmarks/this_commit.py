"""Which commit a result is of, for the JSON that a benchmark writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def this_commit() -> str:
    """The short hash of the tree that this file is in; $HOLDFAST_COMMIT in a copy without git, "unknown" without either."""
    if "HOLDFAST_COMMIT" in os.environ:
        return os.environ["HOLDFAST_COMMIT"]
    try:
        shown = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return shown.stdout.strip() or "unknown"
