"""Aggregates of normalized scores, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.bench import aggregate

SCORES = [np.array([0.0, 1.0]), np.array([1.0, 1.0]), np.array([0.5])]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean", (0.5 + 1.0 + 0.5) / 3),
        ("median", 0.5),
        ("interquartile mean", (0.5 + 1.0 + 1.0) / 3),  # 0 0.5 1 1 1 without the lowest and the highest
        ("optimality gap", (0.5 + 0.0 + 0.5) / 3),
    ],
)
def test_each_statistic_of_three_tasks(name, value):
    found = aggregate.estimate(SCORES, aggregate.STATISTICS[name])
    assert found.value == pytest.approx(value)
    low, high = found.interval
    assert low <= found.value <= high


def test_scores_above_one_do_not_close_the_gap_of_others():
    assert float(aggregate.optimality_gap([np.array([1.5, 0.5])])) == 0.25


def test_an_interval_of_two_runs_reaches_from_one_to_the_other():
    # The mean of a resample is 0, 1/2 or 1 with probability 1/4, 1/2 and 1/4.
    assert aggregate.estimate([np.array([0.0, 1.0])], aggregate.mean).interval == (0.0, 1.0)


def test_an_interval_is_that_of_the_central_limit():
    runs = np.tile([0.0, 1.0], 200)
    low, high = aggregate.estimate([runs], aggregate.mean, seed=3).interval
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.006)
    assert high == pytest.approx(0.5 + 1.96 * 0.5 / 20, abs=0.006)


def test_runs_are_resampled_within_their_task_only():
    apart = [np.array([0.0, 0.0]), np.array([1.0, 1.0])]
    assert aggregate.estimate(apart, aggregate.mean).interval == (0.5, 0.5)


def test_one_run_per_task_has_no_interval():
    assert aggregate.estimate([np.array([0.2]), np.array([0.4])], aggregate.mean) == (pytest.approx(0.3), None)


def test_a_performance_profile_is_the_share_of_runs_above_each_score():
    thresholds = np.array([-0.1, 0.0, 0.5, 1.0])
    found = aggregate.profile(SCORES, thresholds)
    assert found.share.tolist() == pytest.approx([1.0, (0.5 + 1 + 1) / 3, (0.5 + 1 + 0) / 3, 0.0])
    assert (found.low <= found.share).all() and (found.share <= found.high).all()
    # At 0.5 only the first task varies: its share is 0, 1/2 or 1.
    assert (found.low[2], found.high[2]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    alone = aggregate.profile([np.array([0.3])], thresholds)
    assert alone.low.tolist() == alone.high.tolist() == alone.share.tolist() == [1.0, 1.0, 0.0, 0.0]
