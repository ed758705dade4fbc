"""Every benchmark explains itself: `--help` prints its options, measures nothing and writes nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# In one process, which imports torch and the peers once.
ASK_EACH = """
import contextlib, io, json, runpy, sys
said = {}
for script in sys.argv[1:]:
    sys.argv, out = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(script, run_name="__main__")
        code = "it went on"
    except SystemExit as end:
        code = end.code
    except ModuleNotFoundError as missing:
        code = f"needs {missing.name}"
    said[script] = [code, out.getvalue()]
print(json.dumps(said))
"""


def test_help_of_every_benchmark_runs_nothing():
    scripts = [str(path) for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]
    assert len(scripts) > 10
    before = {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").rglob("*")}
    done = subprocess.run(
        [sys.executable, "-c", ASK_EACH, *scripts], cwd=BENCHMARKS, capture_output=True, text=True, timeout=240
    )
    said = json.loads(done.stdout)
    assert {script: code for script, (code, _) in said.items() if code} == {}, done.stderr[-2000:]
    assert all(text.startswith("usage: ") for _, text in said.values())
    assert {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").rglob("*")} == before


@pytest.mark.parametrize("name", ["learning", "out_of_the_box"])
def test_help_says_that_lunar_lander_needs_box2d(name):
    text = (BENCHMARKS / f"{name}.py").read_text()
    assert "pip install 'holdfast[box2d]'" in (ast.get_docstring(ast.parse(text)) or "")
    assert "ArgumentParser(description=__doc__" in text
