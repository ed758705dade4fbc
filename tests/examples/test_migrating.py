"""Every before/after pair shows what it claims: the old policy fails there, the new one does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "migrating"


def figures(name: str) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


def test_hidden_as_attribute():
    got = figures("hidden_as_attribute")
    assert got["before_replay"] > 1e-2 and got["after_replay"] < 1e-5
    assert got["before_other_batch"] == 1.0
    assert got["before_nan_survives"] == 1.0 and got["after_nan_survives"] == 0.0


def test_functional_hidden_with_factored_heads():
    got = figures("functional_hidden")
    assert got["before_ratio_gap"] > 1e-2 and got["after_ratio_gap"] < 1e-5
    assert got["after_forbidden_actions"] == 0


def test_dictionary_of_states():
    got = figures("dictionary_of_states")
    assert got["before_mixed_up"] > 1e-2 and got["after_mixed_up"] < 1e-6
    assert got["before_replay"] > 1e-2 and got["after_replay"] < 1e-5


def test_base_class_wrapper():
    got = figures("base_class_wrapper")
    assert got["before_replay"] > 1e-2 and got["after_replay"] < 1e-5
    assert got["rows_restored"] == 4


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_every_pair_is_in_the_page(path):
    page = (FOLDER.parents[1] / "docs" / "migrate.md").read_text()
    assert f"examples/migrating/{path.name}" in page
