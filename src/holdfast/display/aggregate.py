"""Scores of several runs as one number with an interval: the interquartile mean and its stratified bootstrap.

Agarwal et al. (2021, "Deep RL at the Edge of the Statistical Precipice") recommend it for few runs: the mean of the
middle half is less sensitive to one lucky seed than the mean and less noisy than the median. Runs are resampled within
each task, because the tasks are fixed and the seeds are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RESAMPLES = 2000


def interquartile_mean(scores: Array) -> Array:
    """The mean over the first axis without its lowest and highest quarter (rounded down: with three scores, all count).

    >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])))
    1.5
    """
    cut = len(scores) // 4
    return np.sort(scores, axis=0)[cut : len(scores) - cut].mean(axis=0)


def is_mean_and_range(runs: int) -> bool:
    """Whether so few runs of one task have an interquartile mean that is their mean, and a 95% bootstrap interval that is their
    range: a resample of three is three times the lowest in one of 27 cases, more often than in 2.5%."""
    return runs <= 3


def bootstrap_interval(strata: Sequence[Array], level: float = 0.95, seed: int = 0) -> Array:
    """Confidence interval [2, ...] of the interquartile mean of all scores; `strata` has one array [runs, ...] per task.

    Percentiles over resamples of the runs; the runs of each task are resampled separately.
    """
    random = np.random.default_rng(seed)
    parts = []
    for scores in strata:
        chosen = random.integers(len(scores), size=(RESAMPLES, len(scores)))
        parts.append(np.swapaxes(scores[chosen], 0, 1))  # [runs, resamples, ...]
    means = interquartile_mean(np.concatenate(parts))  # [resamples, ...]
    tail = 50 * (1 - level)
    return np.percentile(means, [tail, 100 - tail], axis=0)
