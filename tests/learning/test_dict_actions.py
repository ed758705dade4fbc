"""A Dict action is learned as a whole: the right tool and the right place, both from memory, under masks.

Without memory the best return is 0: one of two tools that are not blocked, and on average half a unit from the place. Whoever learns
one part alone gets 0.5 at most: the tool and the middle of the places, or a tool at random at the right place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import holdfast as hf
from learning.base_seed import BASE_SEED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from dict_actions import Workshop, train


def mean_return(core: str, seed: int) -> float:
    env = hf.envs.make(Workshop, 16)
    return hf.evaluate(train(40_000, core, seed).policy, env, 200, deterministic=True, seed=seed).mean_return


@pytest.mark.parametrize("seed", range(3 * BASE_SEED, 3 * BASE_SEED + 3))
def test_both_parts_of_an_action_are_learned_from_memory(seed: int):
    assert mean_return("gru", seed) > 0.85


def test_without_memory_they_are_not():
    assert mean_return("none", BASE_SEED) < 0.2
