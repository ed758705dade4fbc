"""A partially observed robot inside rsl_rl's runner: learned with our classes as well as with its own.

The criterion is `benchmarks/rsl_rl_learning.py`'s, and was decided before it was run: the one-sided 95% bound of the difference of
the mean rewards is above -2% of the range from standing still to perfect. That is over 16 seeds here, over 40 in its results.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rsl_rl")

from learning.base_seed import BASE_SEED

FOLDER = Path(__file__).parents[2] / "benchmarks"
SEEDS = range(1000 * BASE_SEED, 1000 * BASE_SEED + 16)


def test_a_robot_that_is_told_once_where_to_go_learns_it_as_well_as_with_rsl_rls_own_classes(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from rsl_rl_learning import MARGIN, final_reward, lower_bound

    ours, theirs = ([final_reward(who, seed) for seed in SEEDS] for who in (True, False))
    print(f"ours {ours}, rsl_rl's {theirs}")
    assert min(ours) > 0.8
    assert lower_bound(ours, theirs) > -MARGIN
