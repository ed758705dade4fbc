"""Nobody detaches a carried state by hand: only `state.py` and `memory.py` do, and no user has to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdfast"
EXAMPLES = ROOT / "examples"

STATE_FILES = ("state.py", "memory.py")

# Every other `detach` in the source, by file and function, and why it is not the detaching of a carried state.
ELSEWHERE = {
    ("cores/gated.py", "_reset"): 'the reset mode "detach" itself: a cut inside the recurrence, at episode boundaries',
    ("kernels/reference.py", "_reset"): 'the same in the reference recurrence: reset mode "detach"',
    ("policy.py", "detach_state"): "the public one-liner over state.detach",
    ("checks.py", "trace_nonfinite"): "looks at outputs and inputs to report NaN; keeps nothing",
    ("export.py", "plain"): "example observations that the user passed",
    ("export_graph.py", "_state_ports"): "the numbers of a learned start, to be written into a file",
    ("nonfinite.py", "_on_host"): "copies of everything around a NaN, to be written into a file",
    ("envs/base.py", "state_dict"): "an environment's own tensors, copied to be saved",
}

# What examples show as the code to be replaced: plain torch, nothing of ours in it.
REPLACED = ("Before", "HandWrapper", "KeepsHidden")


def detaches(file: Path) -> Iterator[tuple[list[str], int]]:
    """Every call of something named detach: the classes and functions around it, outermost first, and its line."""

    def walk(node: ast.AST, around: list[str]) -> Iterator[tuple[list[str], int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                yield from walk(child, [*around, child.name])
                continue
            if isinstance(child, ast.Call):
                name = getattr(child.func, "attr", getattr(child.func, "id", ""))
                if name in ("detach", "detach_"):
                    yield around, child.lineno
            yield from walk(child, around)

    yield from walk(ast.parse(file.read_text()), [])


def test_the_search_finds_every_way_of_writing_it(tmp_path: Path):
    file = tmp_path / "code.py"
    file.write_text(
        "class A:\n    def f(self, h):\n        self.h = [x.detach() for x in h]\n"
        "def g(h):\n    h.detach_()\n    return state.detach(h), detach(h)\n"
    )
    assert list(detaches(file)) == [(["A", "f"], 3), (["g"], 5), (["g"], 6), (["g"], 6)]


def test_carried_states_are_detached_in_state_and_memory_only():
    found = set()
    for file in SOURCE.rglob("*.py"):
        name = file.relative_to(SOURCE).as_posix()
        of_the_doctor = name.startswith("doctor/")  # which holds other people's policies, not our states
        if name in STATE_FILES or of_the_doctor:
            continue
        for around, line in detaches(file):
            place = (name, around[-1] if around else "")
            assert place in ELSEWHERE, f"{name}:{line}: detach in {'.'.join(around)}"
            found.add(place)
    here = {place for place in ELSEWHERE if (SOURCE / place[0]).exists()}
    assert found == here, "an exception that is no longer needed should go"


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.py")), ids=lambda file: file.relative_to(EXAMPLES).as_posix())
def test_no_example_detaches_except_in_the_code_it_replaces(file: Path):
    for around, line in detaches(file):
        assert around and around[0] in REPLACED, f"{file.name}:{line}"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name in REPLACED:
            assert "hf." not in ast.unparse(node), f"{file.name}: {node.name} is the code before, without Holdfast"
