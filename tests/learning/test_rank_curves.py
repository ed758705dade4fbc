"""With 12 environments over 1, 2, 3 or 4 ranks learning is equally quick, and the test would see if it were not.

"Equal" is a claim of its own, not the want of a visible difference: the whole 90% interval of each difference must lie
within a margin (two one-sided tests at 5%). The margin is less than what it costs to have 6 environments and not 12.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import rank_jobs
from learning.base_seed import BASE_SEED
from rank_jobs import run_ranks

MARGIN = 1.5  # thousandths of area; 6 environments instead of 12 cost 1.8
FIRST = 1000 * (BASE_SEED - 1)
ALONE, TOGETHER = range(FIRST, FIRST + 60), range(FIRST + 100, FIRST + 124)  # seeds


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return rank_jobs.areas(ALONE)


def interval(some: list[float], others: list[float]) -> tuple[float, float]:
    """The 90% interval of the difference of two means; with so many seeds its t is 1.68."""
    error = math.sqrt(np.var(some, ddof=1) / len(some) + np.var(others, ddof=1) / len(others))
    difference = float(np.mean(some) - np.mean(others))
    return difference - 1.68 * error, difference + 1.68 * error


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_learn_as_quickly_as_one_process(alone: list[float], size: int):
    low, high = interval(run_ranks(size, rank_jobs.areas, TOGETHER)[0], alone)
    print(f"{size} ranks: {low:.2f} to {high:.2f}")
    assert -MARGIN < low <= high < MARGIN


@pytest.mark.parametrize(("size", "broken"), [(2, "own gradients"), (4, "own gradients"), (4, "same seeds")])
def test_ranks_that_do_not_work_together_learn_more_slowly(alone: list[float], size: int, broken: str):
    low, high = interval(run_ranks(size, rank_jobs.areas, TOGETHER[:12], broken)[0], alone)
    print(f"{size} ranks, {broken}: {low:.2f} to {high:.2f}")
    assert low < -MARGIN and high < 0, "what the test above excludes"
