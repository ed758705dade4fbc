"""The Triton recurrences against the float64 reference, forward and backward, interpreted: no GPU needed."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

CASES = (
    "no resets", "rows and units that fill no tile", "one step, one row", "a wide layer", "reset at every step",
    "learned start", "detached gradients", "huge gradients", "tiny gradients",
)  # fmt: skip


@functools.cache
def largest_errors() -> dict[str, float]:
    script = Path(__file__).with_name("interpreted_recurrences.py")
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}  # read when a kernel is defined: never in this process
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=interpreted)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_agrees_with_the_reference(kind: str, case: str) -> None:
    assert largest_errors()[f"{kind}: {case}"] < 2e-3
