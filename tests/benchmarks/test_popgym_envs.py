"""The benchmark of the environments prints a row per environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "popgym_envs.py"


def test_it_measures_the_environments_that_are_asked_for():
    flags = ["--only", "MineSweeper", "--num-envs", "16", "--seconds", "0.01"]
    out = subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=True).stdout
    rows = [line for line in out.splitlines() if line.startswith("| MineSweeper")]
    assert len(rows) == 3 and all(line.count("|") == 5 for line in rows)
