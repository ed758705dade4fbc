"""The Triton linear recurrence against the float64 reference, forward and backward, interpreted: no GPU needed."""

import functools
import importlib.util
from pathlib import Path

import pytest

import triton_interpreter
from kernels.linear_problems import FORMS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

CASES = (
    "no resets", "lanes that fill no program", "one step, one row", "reset at every step", "learned start",
    "detached gradients",
)  # fmt: skip


@functools.cache
def worst_errors() -> dict[str, tuple[float, str]]:
    return triton_interpreter.run(Path(__file__).with_name("interpreted_linear_kernels.py"))


@pytest.mark.parametrize(("form", "per_channel"), FORMS)
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_agrees_with_the_reference(form: str, per_channel: bool, case: str) -> None:
    error, name = worst_errors()[f"{form} {per_channel}: {case}"]
    assert error < 1e-6, name
