"""Nobody detaches a carried state by hand: only `state.py` and `state_rows.py` do, and no user has to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
EXAMPLES = ROOT / "examples"

STATE_FILES = ("state.py", "state_rows.py")

# A statement with a detach is about a state if it, or the function it is in, has a name like these.
OF_A_STATE = re.compile(r"state|hidden|memory|lstm|gru|leaf|leaves|carr|^starts?$|initial|^[hc]x?$")

# The others in the source that are about a state, by file and function, and why they carry nothing on.
ELSEWHERE = {
    ("cores/base.py", "reset_rows"): 'reset mode "detach" of a core of one\'s own',
    ("cores/gated.py", "_reset"): 'the reset mode "detach" itself: a cut inside the recurrence, at episode boundaries',
    ("kernels/reference/resets.py", "reset"): 'the same in the reference recurrence: reset mode "detach"',
    ("policies/base.py", "detach_state"): "the public one-liner over state.detach",
    ("kernels/portable/mlstm.py", "_chunk"): "a look whether the memory is finite; the memory itself keeps its graph",
    ("cores/mlstm.py", "_step"): 'the reset mode "detach" itself',
    ("kernels/portable/mlstm.py", "_not_finite"): "the same, of what comes in",
    ("deploy/export_graph.py", "_state_ports"): "the numbers of a learned start, to be written into a file",
    ("cores/base.py", "_trace"): "the states after every step, to look at; the one that goes on has its graph",
    ("cores/linear_core.py", "_trace"): "the same",
    ("deploy/hub.py", "_write"): "weights, to be written into a file",
    ("algorithms/off_policy.py", "state_dict"): "weights of the target network, to be saved",
    ("algorithms/r2d2.py", "errors"): "Q, for the metrics; states keep their graph",
    ("integrations/rsl_rl/exports.py", "start"): "the numbers of a fresh state, to be written into a file",
    ("integrations/rsl_rl/models.py", "detach"): "a method of rsl_rl's models, which its runners may call",
    ("integrations/rsl_rl/models.py", "detach_hidden_state"): "the same method by its name there",
    ("deploy/hub.py", "find_record"): "weights, to be compared with those of a checkpoint",
    ("envs/base.py", "state_dict"): "an environment's own tensors, copied to be saved",
}

# What examples show as the code to be replaced: plain torch, nothing of ours in it.
REPLACED = ("Before", "HandWrapper", "KeepsHidden")


class Detach(NamedTuple):
    around: list[str]  # classes and functions, outermost first
    line: int
    names: set[str]  # all names in its statement, and that of its function


def detaches(file: Path) -> Iterator[Detach]:
    """Every call of something named detach."""

    def walk(node: ast.AST, around: list[str], statement: ast.AST) -> Iterator[Detach]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                yield from walk(child, [*around, child.name], child)
                continue
            inner = child if isinstance(child, ast.stmt) else statement
            if isinstance(child, ast.Call) and _name(child.func) in ("detach", "detach_"):
                names = {_name(part) for part in ast.walk(inner)} - {"", "detach", "detach_"}
                yield Detach(around, child.lineno, names | set(around[-1:]))
            yield from walk(child, around, inner)

    tree = ast.parse(file.read_text())
    yield from walk(tree, [], tree)


def _name(node: ast.AST) -> str:
    return getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None))) or ""


def is_of_a_state(found: Detach) -> bool:
    return any(OF_A_STATE.search(name.lower()) for name in found.names)


def test_the_search_tells_states_from_other_tensors(tmp_path: Path):
    file = tmp_path / "code.py"
    file.write_text(
        "class A:\n    def f(self, h):\n        self.h = [x.detach() for x in h]\n"
        "def g(new):\n    new.detach_()\n    return state.detach(new), detach(loss)\n"
        "def keep_hidden(x):\n    return x.detach()\n"
    )
    found = list(detaches(file))
    assert [(one.around, one.line) for one in found] == [
        (["A", "f"], 3),
        (["g"], 5),
        (["g"], 6),
        (["g"], 6),
        (["keep_hidden"], 8),
    ]
    assert [is_of_a_state(one) for one in found] == [True, False, True, True, True]


def test_carried_states_are_detached_in_state_and_memory_only():
    found = set()
    for file in SOURCE.rglob("*.py"):
        name = file.relative_to(SOURCE).as_posix()
        of_the_doctor = name.startswith("doctor/")  # which holds other people's policies, not our states
        if name in STATE_FILES or of_the_doctor:
            continue
        for one in filter(is_of_a_state, detaches(file)):
            place = (name, one.around[-1] if one.around else "")
            assert place in ELSEWHERE, f"{name}:{one.line}: detach in {'.'.join(one.around)}"
            found.add(place)
    assert found == ELSEWHERE.keys(), "an exception that is no longer needed should go"


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.py")), ids=lambda file: file.relative_to(EXAMPLES).as_posix())
def test_no_example_detaches_anything_except_in_the_code_it_replaces(file: Path):
    for one in detaches(file):
        assert one.around and one.around[0] in REPLACED, f"{file.name}:{one.line}"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name in REPLACED:
            assert "hf." not in ast.unparse(node), f"{file.name}: {node.name} is the code before, without Holdfast"
