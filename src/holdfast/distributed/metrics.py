"""One row of metrics from the rows of all ranks, and the episodes of all ranks; every rank gets the same.

Metrics are computed in `training/iteration.py` and `training/telemetry.py`; here the numbers of ranks are combined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from holdfast.distributed.ranks import Ranks
from holdfast.spans import span

RankWeights = Sequence[float]  # each rank's share of the environments


def _mean(numbers: list[float], weights: RankWeights) -> float:
    return sum(n * w for n, w in zip(numbers, weights)) / sum(weights)


def _root_mean_square(numbers: list[float], weights: RankWeights) -> float:
    return math.sqrt(_mean([n * n for n in numbers], weights))


def _largest(numbers: list[float], weights: RankWeights) -> float:
    return max((n for n in numbers if not math.isnan(n)), default=math.nan)


def _sum(numbers: list[float], weights: RankWeights) -> float:
    return sum(numbers)


# Losses (train/*) are reduced where they are computed; the other metrics belong to one rank until they are combined.
REDUCTIONS: dict[str, Callable[[list[float], RankWeights], float]] = {
    "steps": _sum,
    "rollout/episodes": _sum,
    "env/failures": _sum,
    "memory/rms": _root_mean_square,
    "memory/max": _largest,
    "memory/saturation": _mean,
    "memory/nan": _sum,
    "memory/resets": _sum,
    "memory/replay_gap": _largest,
    "memory/staleness": _mean,
    "time/env": _largest,
    "time/policy": _largest,
    "time/update": _largest,
}


def combine(row: dict[str, float], ranks: Ranks, num_envs: int, device: torch.device) -> dict[str, float]:
    """The row of the whole run: sums, means weighted by environments, or the largest, as each metric needs."""
    if not ranks.joined:
        return row
    names = [name for name in REDUCTIONS if name in row]
    with span("metrics of all ranks"):
        columns = zip(*ranks.all_gather([float(row[name]) for name in names], device))
    weights = [len(ranks.share(num_envs, rank)) for rank in range(ranks.size)]
    whole = {name: REDUCTIONS[name](list(numbers), weights) for name, numbers in zip(names, columns)}
    counts = {name: int(whole[name]) for name in names if isinstance(row[name], int)}
    return {**row, **whole, **counts}


def episodes(
    ranks: Ranks, returns: list[float], lengths: list[int], keep: int, device: torch.device
) -> tuple[list[float], list[int]]:
    """The episodes that ended on any rank, at most the last `keep` of each, taken from the ranks in turn."""
    if not ranks.joined:
        return returns, lengths
    ended = list(zip(returns, lengths))[-keep:]
    filled = [*ended, *[(math.nan, math.nan)] * (keep - len(ended))]
    with span("episodes of all ranks"):
        everybody = ranks.all_gather([float(len(ended)), *(number for pair in filled for number in pair)], device)
    per_rank = [list(zip(flat[1::2], flat[2::2]))[: int(flat[0])] for flat in everybody]
    # Aligned at their ends, so that what is dropped from the front comes from all ranks alike.
    longest = max(map(len, per_rank))
    padded = [[None] * (longest - len(part)) + part for part in per_rank]
    mixed = [pair for turn in zip(*padded) for pair in turn if pair is not None]
    return [pair[0] for pair in mixed], [int(pair[1]) for pair in mixed]
