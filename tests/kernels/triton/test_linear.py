"""The Triton linear recurrence against the float64 reference, forward and backward, interpreted: no GPU needed."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.linear_problems import FORMS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

CASES = (
    "no resets", "lanes that fill no program", "one step, one row", "reset at every step", "learned start",
    "detached gradients",
)  # fmt: skip


@functools.cache
def worst_errors() -> dict[str, tuple[float, str]]:
    script = Path(__file__).with_name("interpreted_linear.py")
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}  # read when a kernel is defined: never in this process
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=interpreted)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("form", "per_channel"), FORMS)
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_agrees_with_the_reference(form: str, per_channel: bool, case: str) -> None:
    error, name = worst_errors()[f"{form} {per_channel}: {case}"]
    assert error < 1e-6, name
