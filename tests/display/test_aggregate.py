"""The interquartile mean and its bootstrap interval."""

import numpy as np

from holdfast.display.aggregate import bootstrap_interval, interquartile_mean, is_mean_and_range


def test_the_interquartile_mean_leaves_out_the_lowest_and_highest_quarter():
    scores = np.array([[9.0], [1.0], [2.0], [3.0], [-50.0], [4.0], [100.0], [5.0]])
    assert interquartile_mean(scores) == [(2 + 3 + 4 + 5) / 4]
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0, "all three count"


def test_the_interval_covers_the_true_mean_about_as_often_as_its_level():
    random = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        low, high = bootstrap_interval([random.normal(1.0, 2.0, 20)], seed=trial)
        hits += low <= 1.0 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_runs_are_resampled_within_their_task():
    # Two tasks of scores 0 and 1: however the runs fall, half of all scores are 0.
    zeros, ones = np.zeros(8), np.ones(8)
    np.testing.assert_array_equal(bootstrap_interval([zeros, ones]), [0.5, 0.5])
    low, high = bootstrap_interval([np.concatenate([zeros, ones])])
    assert low < 0.4 and high > 0.6


def test_few_runs_have_their_mean_and_their_range():
    scores = np.random.default_rng(0).normal(size=(4, 50))
    for runs in (2, 3, 4):
        some = scores[:runs]
        is_range = np.allclose(bootstrap_interval([some]), [some.min(0), some.max(0)])
        is_mean = np.allclose(interquartile_mean(some), some.mean(0))
        assert is_mean_and_range(runs) == (is_range and is_mean), runs
