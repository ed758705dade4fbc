"""Every recipe runs, shortened by its arguments, and shows what it says it shows. Over more seeds: tests/learning/test_recipes.py."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"

# recipe: (arguments, what its result must satisfy)
RUNS = {
    "curriculum": (["--steps", "16000"], lambda r: r["left"] > 4),
    "self_play": (["--steps", "12000"], lambda r: r["league"] > 1 and r["after"] > r["before"] + 0.2),
    "two_optimizers": (["--updates", "4"], lambda r: r["critic"] < 0.5),
    "gradient_accumulation": (["--updates", "2"], lambda r: r["difference"] < 1e-4),
    "cloning": (
        ["--clone-steps", "10000", "--steps", "4000"],
        lambda r: r["clone"] > r["before"] + 0.5 and r["clone, then ppo"] > r["ppo alone"] + 0.5,
    ),
    "distillation": (
        ["--teacher-steps", "6000", "--steps", "4000"],
        lambda r: r["student"] > r["student without memory"] + 25,
    ),
    "meta_rl": (["--steps", "20000", "--episodes", "4"], lambda r: r["last"] > r["first"] + 0.15 > r["single"]),
}


@pytest.fixture
def recipes(monkeypatch, tmp_path):
    """As a user starts them, in a folder that is empty."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_shows_what_it_says(name, recipes):
    arguments, holds = RUNS[name]
    result = importlib.import_module(name).main(arguments)
    assert holds(result), result


def test_the_page_and_the_folder_have_the_same_recipes():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert (
        set(re.findall(r"examples/recipes/(\w+)\.py", page))
        == {path.stem for path in RECIPES.glob("*.py")}
        == set(RUNS)
    )
