"""The check that all interpreted kernels run under: memory outside a kernel's tensors is neither read nor written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import triton_interpreter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_a_kernel_that_leaves_its_tensors_is_found():
    said = triton_interpreter.run(Path(__file__).with_name("interpreted_out_of_bounds.py"))
    assert said["fits"] == ""
    assert "copy_kernel loads 1 numbers outside its tensors" in said["reads"]
    assert "copy_kernel stores 1 numbers outside its tensors" in said["writes"]
