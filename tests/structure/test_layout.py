"""Where files are: the modules at the root, the folders, tests that mirror them, and modules that say what they do."""

from __future__ import annotations

import ast
import re

from structure.source_tree import PACKAGE, ROOT, modules

ROOT_FILES = {
    "__init__.py",
    "__main__.py",
    "py.typed",
    "state.py",
    "checks.py",
    "spans.py",
    "named_objects.py",
    "data_files.py",
    "causes.py",
    "causes.toml",
    "shown_text.py",
    "memory.py",
    "id_index.py",
    "state_rows.py",
    "plain_checks.py",
    "heads.py",  # these two show documented names of modules that live in folders
    "env_failures.py",
}
FOLDERS = {
    "config",
    "kernels",
    "cores",
    "distributed",
    "policies",
    "envs",
    "rollout",
    "algorithms",
    "engines",
    "runs",
    "display",
    "training",
    "profiling",
    "deploy",
    "sweep",
    "doctor",
    "integrations",
    "bench",
    "cli",
}
ELSEWHERE = {
    "tests/conformance": "the laws, over every core and every way to run it",
    "tests/learning": "slow: whole trainings",
    "tests/structure": "the shape of the source tree",
    "tests/benchmarks": "benchmarks/",
    "tests/docs": "docs/, mkdocs.yml and notebooks/",
    "tests/examples": "examples/",
    "tests/doctor/gallery": "docs/gallery.md",
    "tests/test_holdfast_pytest.py": "src/holdfast_pytest.py",
    "tests/test_import.py": "src/holdfast/__init__.py",
    "tests/test_readme.py": "README.md",
}
"""Tests of something other than one file or folder of the package."""


def test_the_root_of_the_package_holds_only_what_everything_else_speaks():
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert names == ROOT_FILES | FOLDERS


def test_the_contract_on_imports_covers_every_folder_and_root_module():
    text = (ROOT / "pyproject.toml").read_text()
    listed = text.partition("layers = [")[2].partition("]")[0]
    names = {name.strip() for layer in re.findall(r'"([^"]+)"', listed) for name in layer.split(":")}
    modules_at_root = {name.removesuffix(".py") for name in ROOT_FILES if name.endswith(".py")}
    assert names == FOLDERS | modules_at_root - {"__init__", "__main__", "heads", "env_failures"}


def test_every_test_file_mirrors_a_file_or_folder_of_the_package():
    strays = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        path = test.relative_to(ROOT).as_posix()
        if path in ELSEWHERE or any(path.startswith(folder + "/") for folder in ELSEWHERE):
            continue
        inside = test.relative_to(ROOT / "tests")
        if inside.parent.as_posix() == ".":
            mirrored = PACKAGE / inside.name.removeprefix("test_")
        else:
            mirrored = PACKAGE / inside.parent
        if not mirrored.exists():
            strays.append(path)
    assert not strays


def test_every_folder_of_the_package_has_tests():
    assert {folder for folder in FOLDERS if not list((ROOT / "tests" / folder).glob("test_*.py"))} == set()


def test_every_module_with_code_says_what_it_is_for():
    silent = [name for name, tree in modules().items() if tree.body and not ast.get_docstring(tree)]
    assert not silent
