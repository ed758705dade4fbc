"""Many tasks as one number: normalized scores, their aggregates with bootstrap intervals, and performance profiles.

As Agarwal et al. (2021, "Deep RL at the Edge of the Statistical Precipice") recommend. Scores come as one array per task, with
a number per run. The tasks are fixed and the seeds are not, so the bootstrap resamples the runs of each task separately;
with one run per task there is nothing to resample, and no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.display.aggregate import interquartile_mean

Array = np.ndarray[Any, Any]
Scores = Sequence[Array]
"""Per task: [..., runs]."""
RESAMPLES = 2000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A number and its 95% interval; the interval is None if no task has more than one run."""

    value: float
    interval: tuple[float, float] | None


def mean(scores: Scores) -> Array:
    """Mean over tasks of the mean over runs.

    >>> float(mean([np.array([0.0, 1.0]), np.array([1.0])]))
    0.75
    """
    return _task_means(scores).mean(0)


def median(scores: Scores) -> Array:
    """Median over tasks of the mean over runs."""
    return np.asarray(np.median(_task_means(scores), axis=0))


def iqm(scores: Scores) -> Array:
    """Mean of the middle half of all runs of all tasks."""
    return interquartile_mean(np.moveaxis(np.concatenate(scores, axis=-1), -1, 0))


def optimality_gap(scores: Scores) -> Array:
    """How far runs stay below a score of 1, on average; what lies above 1 does not make up for it."""
    return mean([np.maximum(1.0 - part, 0.0) for part in scores])


STATISTICS: dict[str, Callable[[Scores], Array]] = {
    "interquartile mean": iqm,
    "mean": mean,
    "median": median,
    "optimality gap": optimality_gap,
}


def estimate(scores: Scores, statistic: Callable[[Scores], Array], seed: int = 0) -> Estimate:
    """A statistic and its bootstrap interval."""
    value = float(statistic(scores))
    if all(len(part) < 2 for part in scores):
        return Estimate(value, None)
    low, high = _percentiles(statistic(resampled(scores, seed)))
    return Estimate(value, (float(low), float(high)))


class PerformanceProfile(NamedTuple):
    """share[i]: the part of runs that score above thresholds[i], each task with the same weight; low, high: its interval."""

    thresholds: Array
    share: Array
    low: Array
    high: Array


def profile(scores: Scores, thresholds: Array, seed: int = 0) -> PerformanceProfile:
    """Performance profile: the higher the curve, the better."""
    share = np.array([float(mean([part > t for part in scores])) for t in thresholds])
    if all(len(part) < 2 for part in scores):
        return PerformanceProfile(thresholds, share, share, share)
    again = resampled(scores, seed)
    low, high = np.array([_percentiles(mean([part > t for part in again])) for t in thresholds]).T
    return PerformanceProfile(thresholds, share, low, high)


def resampled(scores: Scores, seed: int = 0) -> list[Array]:
    """Per task [resamples, runs]: its runs, drawn with replacement."""
    random = np.random.default_rng(seed)
    return [part[random.integers(len(part), size=(RESAMPLES, len(part)))] for part in scores]


def _task_means(scores: Scores) -> Array:
    return np.stack([part.mean(-1) for part in scores])  # [tasks, ...]


def _percentiles(values: Array) -> Array:
    tail = 50 * (1 - LEVEL)
    return np.percentile(values, [tail, 100 - tail])
