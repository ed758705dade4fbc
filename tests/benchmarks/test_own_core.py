"""The benchmark of own cores compares two forms of one cell, and writes what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import own_core

    return own_core


def test_forms_that_differ_are_not_timed(script, monkeypatch):
    script.require_equal(4)
    monkeypatch.setattr(
        script, "RTU", type("Wrong", (script.RTU,), {"read": lambda self, h, x: 2 * script.Loop.read(self, h, x)})
    )
    with pytest.raises(AssertionError):
        script.require_equal(4)


def test_a_small_run_writes_its_figures(script, monkeypatch, tmp_path):
    sizes = ["--num-envs", "4", "--num-steps", "8", "--minibatches", "2", "--hidden-size", "4", "--updates", "1"]
    monkeypatch.setattr(sys, "argv", ["own_core.py", *sizes, "--output", str(tmp_path / "figures.json")])
    assert script.main() == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["steps_per_second"]) == 3 and figures["settings"]["num_steps"] == 8 and figures["commit"]
