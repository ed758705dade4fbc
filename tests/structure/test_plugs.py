"""A trainer runs an algorithm and knows none: no name of one outside of `algorithms/`, `config/` and what accelerates it, and one
loop over the steps of a rollout, one over the minibatches of an update."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from holdfast.config import ALGORITHMS
from structure.source_tree import modules

BLIND = ("training/", "runs/", "display/", "sweep/", "bench/", "cli/")
"""Folders that know `Algorithm` and no particular one."""
OF_OTHERS = {"RecurrentPPO": "sb3-contrib's class, which `holdfast doctor` examines"}
LOOPS = {"turns": "rollout/collector.py", "epochs": "algorithms/on_policy.py"}
"""What is looped over, and the only file that does."""


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Identifiers, imports and texts, with their lines. Docstrings and the help below attributes are left out."""
    prose = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            yield node.lineno, node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value
        else:
            for field in ("id", "attr", "arg", "name", "module"):
                if isinstance(text := getattr(node, field, None), str):
                    yield getattr(node, "lineno", 0), text


def words_of(name: str) -> set[str]:
    """`PPOConfig.clip_range` -> ppo, config, clip, range; a sentence gives its words."""
    spaced = re.sub(r"([a-z0-9])([A-Z])|([A-Z]+)([A-Z][a-z])", r"\1\3 \2\4", name)
    return {word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced)}


@pytest.mark.parametrize("folder", BLIND)
def test_a_folder_names_no_particular_algorithm(folder: str):
    found = [
        f"{file}:{line} {name}"
        for file, tree in modules().items()
        if file.startswith(folder)
        for line, name in names_in(tree)
        if words_of(name) & set(ALGORITHMS) and name not in OF_OTHERS
    ]
    assert not found


def test_the_words_of_a_name_are_found():
    """Or else the test above would show nothing."""
    assert {"ppo"} <= words_of("PPOConfig") & words_of("hf.ppo_loss") & words_of("QueuedPPO") & words_of("a run of PPO")
    assert "ppo" not in words_of("opportunity") | words_of("supports")


@pytest.mark.parametrize("looped, only", LOOPS.items())
def test_there_is_one_loop(looped: str, only: str):
    """`for turn in adapter.turns(...)`, `for epoch in range(config.epochs)`. (rsl_rl's algorithm, in integrations/, is rsl_rl's.)"""
    found = [
        file
        for file, tree in modules().items()
        if not file.startswith("integrations/")
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.While, ast.comprehension))
        and any(
            isinstance(part, ast.Attribute) and part.attr == looped for part in ast.walk(getattr(node, "iter", node))
        )
    ]
    assert found == [only]
