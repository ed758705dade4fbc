"""Without its framework, an integration says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module, hidden, extra",
    [
        ("holdfast.integrations.sb3", "sb3_contrib", "holdfast[sb3]"),
        ("holdfast.integrations.sb3", "stable_baselines3", "holdfast[sb3]"),
        ("holdfast.integrations.torchrl", "torchrl", "holdfast[torchrl]"),
        ("holdfast.integrations.torchrl", "tensordict", "holdfast[torchrl]"),
        ("holdfast.integrations.tensordict", "tensordict", "holdfast[tensordict]"),
        ("holdfast.integrations.rsl_rl", "rsl_rl", "holdfast[rsl_rl]"),
    ],
)
def test_a_missing_framework_is_named_with_the_extra_that_brings_it(module, hidden, extra):
    code = f"""
import sys, importlib.abc
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {hidden!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Hide())
import {module}
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0 and f"pip install '{extra}'" in result.stderr
