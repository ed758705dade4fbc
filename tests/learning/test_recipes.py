"""What the recipes on docs/recipes.md promise, at the length of that page: memory across episodes, cloning, distillation."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from learning.base_seed import BASE_SEED

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
SEEDS = range(BASE_SEED, BASE_SEED + 3)


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Runs a recipe with every seed; what it returned."""
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> list[dict[str, float]]:
        results = []
        for seed in SEEDS:
            (tmp_path / str(seed)).mkdir()
            monkeypatch.chdir(tmp_path / str(seed))
            results.append(importlib.import_module(name).main(["--seed", str(seed)]))
        print(results)
        return results

    return run


def test_a_trial_teaches_what_single_episodes_cannot(play):
    for result in play("meta_rl"):
        assert result["first"] < 0.6 and result["single"] < 0.6, result  # nothing is known yet
        assert result["last"] > 0.8, result  # of 0.9


def test_a_clone_plays_as_its_expert_and_gets_ppo_to_where_it_would_not_come_alone(play):
    for result in play("cloning"):
        assert result["clone"] > result["expert"] - 0.2 > result["before"] + 0.5, result
        assert result["clone, then ppo"] > 0.7 > 0.2 > result["ppo alone"], result


def test_a_student_with_memory_learns_what_its_teacher_sees(play):
    for result in play("distillation"):
        assert result["student"] > 0.8 * result["teacher"] > 3 * result["student without memory"], result


def test_a_curriculum_reaches_what_chance_does_not(play):
    for result in play("curriculum"):
        assert result["with"] > 0.9 > 0.8 > result["without"], result


def test_self_play_beats_the_policy_that_it_began_with(play):
    for result in play("self_play"):
        assert result["after"] > 0.5 > 0.1 > abs(result["before"]), result
