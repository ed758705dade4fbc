"""encode, core and decode are composed in `policies/base.py` (`step` and `unroll`), and nowhere else.

An engine may fuse the three for speed. It is named here, together with the test that compares it with the policy.
"""

from __future__ import annotations

import ast

import pytest

from structure.source_tree import ROOT, modules

COMPOSITION = "policies/base.py"
FUSED_ENGINES = {
    "engines/native.py": "tests/engines/test_native.py",
    "engines/native_parts.py": "tests/engines/test_native_step.py",
    "engines/fused_policy.py": "tests/engines/test_fused.py",
}
"""Each engine that composes the three itself, and the test that compares it with step, unroll or evaluate."""

PARTS = {"encode": "encode", "_encode": "encode", "decode": "decode", "_decode": "decode"}
WAYS_TO_RUN_A_CORE = (
    "forward", "step_unchecked", "output_unchecked", "trace", "_step", "_sequence", "_trace", "advance_",
)  # fmt: skip


def parts_called(tree: ast.AST) -> set[str]:
    """Which of encode, core and decode the code calls."""
    return {part for node in ast.walk(tree) if (part := _part_of(node)) is not None}


def _part_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and node.attr in WAYS_TO_RUN_A_CORE and _is_core(node.value):
        return "core"  # named is enough: it may be called under another name
    if not isinstance(node, ast.Call):
        return None
    if _is_core(node.func):
        return "core"
    if isinstance(node.func, ast.Attribute) and node.func.attr in PARTS and _takes_tensors(node):
        return PARTS[node.func.attr]
    return None


def _is_core(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "core") or (
        isinstance(node, ast.Name) and node.id == "core"
    )


def _takes_tensors(call: ast.Call) -> bool:
    """Not `text.encode()` or `data.decode("utf-8")`."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(not isinstance(argument, ast.Constant) for argument in arguments)


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("y, state = policy.core(policy.encode(obs), state)", {"encode", "core"}),
        ("dist, value = self._decode(y, mask)", {"decode"}),
        ("core = policy.core\ny, state = core(x)", {"core"}),
        ("run = self.core.step_unchecked\nrun(x)", {"core"}),
        ("dist, value = policy.decode(policy.core._step(policy._encode(obs)))", {"encode", "core", "decode"}),
        ("text.encode(); data.decode('utf-8'); policy.core.initial_state(3)", set()),
    ],
)
def test_the_reader_of_syntax_trees_sees_calls(code, parts):
    assert parts_called(ast.parse(code)) == parts


def test_no_other_module_composes_encode_core_and_decode():
    composing = {name: parts_called(tree) for name, tree in modules().items() if len(parts_called(tree)) >= 2}
    others = {name: sorted(parts) for name, parts in composing.items() if name not in (COMPOSITION, *FUSED_ENGINES)}
    assert not others, f"call policy.step or policy.unroll there: {others}"
    assert composing[COMPOSITION] == {"encode", "core", "decode"}


@pytest.mark.parametrize(("engine", "test"), FUSED_ENGINES.items())
def test_an_engine_that_fuses_them_is_compared_with_the_policy(engine, test):
    assert engine in modules(), "remove an engine that is gone from the list above"
    module = "holdfast." + engine.removesuffix(".py").replace("/", ".")
    tree = ast.parse((ROOT / test).read_text())
    imports = {
        f"{node.module}.{alias.name}" if node.module != module else module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert module in imports, f"{test} does not import {module}"
    text = (ROOT / test).read_text()
    assert any(word in text for word in (".unroll(", ".evaluate(", ".step(", "terms_of(", "ppo_loss("))
