"""Tests skip what a missing package is needed for. Where all packages should be, none may be missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def requirements(extras: dict[str, list[str]], extra: str) -> list[Requirement]:
    """What an extra of this project asks for here, with what is in the extras that it names."""
    found = []
    for requirement in map(Requirement, extras[extra]):
        if requirement.name == "holdfast":
            found += [one for name in requirement.extras for one in requirements(extras, name)]
        elif requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


def dev_requirements() -> list[Requirement]:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return requirements(project["optional-dependencies"], "dev")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of(names: set[str]) -> list[str]:
    """The modules that installed distributions are imported by: those of the same name, or all that they hold."""
    held: dict[str, list[str]] = {normal(name): [] for name in names}
    for module, distributions in importlib.metadata.packages_distributions().items():
        for name in held.keys() & set(map(normal, distributions)):
            held[name].append(module)
    return sorted(m for name, found in held.items() for m in [m for m in found if normal(m) == name] or found)


@pytest.mark.skipif(os.environ.get("HOLDFAST_DEV") != "1", reason="`make test` sets HOLDFAST_DEV=1")
def test_every_package_of_the_dev_extra_imports():
    wanted = dev_requirements()
    assert len(wanted) > 20
    for requirement in wanted:
        version = importlib.metadata.version(requirement.name)  # raises where it is missing
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {version} is installed"
    modules = modules_of({requirement.name for requirement in wanted})
    assert {"torchrl", "sb3_contrib", "stable_baselines3", "pettingzoo", "popgym", "onnxruntime", "optuna"} <= set(
        modules
    )
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_make_test_says_that_all_packages_should_be_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "coverage"):
        recipe = re.search(rf"^{target}:.*\n\t(.*)$", makefile, re.M)
        assert recipe is not None and recipe[1].startswith("HOLDFAST_DEV=1 $(PY) -m pytest"), target
