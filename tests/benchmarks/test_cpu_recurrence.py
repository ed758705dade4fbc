"""The benchmark refuses to time something that computes something else, and runs end to end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import cpu_recurrence

    return cpu_recurrence


def test_a_contender_that_ignores_resets_is_a_mismatch(script):
    by_key = {column.key: column for column in script.CONTENDERS}
    problem = script.Problem("lstm", script.Shape(3, 8, 0.4, 5))
    script.check(problem, [by_key["nn"], by_key["hoisted"], by_key["spans"], by_key["loop"], by_key["portable"]])
    with pytest.raises(script.Mismatch, match=r"nn at lstm 3, 8, 0\.4"):
        script.check(problem, [replace(by_key["nn"], resets=True)])


def test_a_mismatch_ends_the_run_with_status_1(script, monkeypatch, tmp_path):
    wrong = [replace(c, resets=True) if c.key == "nn" else c for c in script.CONTENDERS]
    monkeypatch.setattr(script, "CONTENDERS", tuple(wrong))
    output = tmp_path / "figures.json"
    arguments = ["--shapes", "3,8,.4,5", "--columns", "nn", "--no-step", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["cpu_recurrence.py", *arguments])
    assert script.main() == 1 and not output.exists()


def test_a_small_run_writes_its_figures(script, monkeypatch, tmp_path, capsys):
    output = tmp_path / "figures.json"
    arguments = [
        "--shapes",
        "3,8,.4,5",
        "--columns",
        "nn,portable",
        "--no-step",
        "--repeats",
        "2",
        "--output",
        str(output),
    ]
    monkeypatch.setattr(sys, "argv", ["cpu_recurrence.py", *arguments])
    assert script.main() == 0
    figures = json.loads(output.read_text())
    assert [set(row["ms"]) for row in figures["sequences"]] == [{"nn", "portable"}] * 2
    assert "Holdfast portable" in capsys.readouterr().out
