"""The program that takes turns with Holdfast, and the reading of a GPU's timeline; neither needs a GPU or JAX."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

STAND_IN = """
import json, sys
def serve(program):
    if json.loads(program)["env"] != "RepeatPreviousEasy":
        raise KeyError("no such task")
    print(json.dumps({"compile_seconds": 2.0}), flush=True)
    for line in sys.stdin:
        print(json.dumps([int(1000 * float(line)), float(line) / 2]), flush=True)
"""


@pytest.fixture
def engines(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = importlib.import_module("gpu_engines")
    (tmp_path / "jax_ppo.py").write_text(STAND_IN)
    monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "gpu_engines.py"))
    return benchmark


def test_a_program_in_another_process_trains_when_it_is_asked(engines):
    program = engines.JaxProgram(engines.Case("RepeatPreviousEasy", "lstm", 16))
    program.wait_until_compiled()
    program.train(1.0)
    program.train(3.0)
    program.close()
    assert program.result() == {"steps_per_second": 2000.0, "rounds": [2000.0, 2000.0], "compile_seconds": 2.0}


def test_a_program_that_fails_says_why(engines):
    program = engines.JaxProgram(engines.Case("Elsewhere", "lstm", 16))
    with pytest.raises(RuntimeError, match="JAX ended with code 1: KeyError: 'no such task'"):
        program.wait_until_compiled()


def test_every_case_of_jax_is_compared_once(engines):
    compared = [case for case in engines.CASES if engines.has_jax_program(case)]
    assert len(compared) == len(set(compared)) == 5 and len(set(map(str, engines.CASES))) == len(engines.CASES)


def test_a_timeline_adds_up_busy_time_and_names_pauses(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    timeline = importlib.import_module("gpu_timeline")
    works = [timeline.Work("c", 70, 71), timeline.Work("a", 0, 4), timeline.Work("b", 2, 5), timeline.Work("d", 72, 80)]
    assert timeline.busy(works) == 14
    assert timeline.pauses(works) == [("b", "c", 65)]
