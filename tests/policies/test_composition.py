"""encode, core and decode are composed in one place: everything else calls `policy.step` and `policy.unroll`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent
PARTS = {
    "encode": {"encode", "_encode", "encoder"},
    "core": {"core", "step_unchecked", "sequence_unchecked", "_step", "_sequence"},
    "decode": {"decode", "_decode"},
}
# Engines that fuse the parts for speed; each is tested against `step` and `unroll`.
ENGINES = {
    "engines/native.py": "C without autograd: tests/engines/test_native.py",
    "engines/cuda_graph.py": "a captured rollout: tests/engines/test_cuda_graph.py",
}
# The modules that define the parts.
DEFINITIONS = {"policies/base.py", "policies/actor.py", "policies/actor_critic.py"}


def parts_called(text: str) -> set[str]:
    """Which of encode, core and decode a module calls as an attribute of something, with data as the first argument."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args]
    calls = [call for call in calls if not isinstance(call.args[0], ast.Constant)]  # bytes.decode("utf-8")
    names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
    return {part for part, spellings in PARTS.items() if names & spellings}


def test_the_search_finds_a_composition():
    assert parts_called("y, s = self.core(policy.encode(obs), s)\ndist = policy.decode(y)") == set(PARTS)
    assert parts_called("policy.step(obs, state)\nself.core.initial_state(3)") == set()


@pytest.mark.parametrize("file", sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")))
def test_no_module_composes_the_parts_itself(file):
    if file in DEFINITIONS or file in ENGINES or file.startswith("cores/"):
        return
    called = parts_called((SOURCE / file).read_text())
    assert len(called) < 2, f"{file} calls {sorted(called)}; call policy.step or policy.unroll"
