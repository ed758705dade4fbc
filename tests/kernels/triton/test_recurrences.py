"""The Triton recurrences against the float64 reference, forward and backward, interpreted: no GPU needed."""

import functools
import importlib.util
from pathlib import Path

import pytest

import triton_interpreter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

CASES = (
    "no resets", "rows and units that fill no tile", "one step, one row", "a wide layer", "reset at every step",
    "learned start", "detached gradients", "huge gradients", "tiny gradients",
)  # fmt: skip


@functools.cache
def largest_errors() -> dict[str, float]:
    return triton_interpreter.run(Path(__file__).with_name("interpreted_recurrences.py"))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_agrees_with_the_reference(kind: str, case: str) -> None:
    assert largest_errors()[f"{kind}: {case}"] < 2e-3
