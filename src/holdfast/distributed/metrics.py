"""`Metric`: what a number of a run's log is called and how ranks combine it; the row of metrics of all ranks, and their episodes.

Whoever computes a metric declares it: the algorithm its losses, `training/iteration.py` the
rest. The display, the log and the documentation read the declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from holdfast.distributed.ranks import Ranks
from holdfast.spans import span

RankWeights = Sequence[float]  # each rank's share of the environments


class Metric(NamedTuple):
    """One number of a row. over_ranks: how the numbers of ranks become one; "equal" if they are reduced where they are computed."""

    key: str
    label: str = ""  # in the dashboard; "": not shown
    over_ranks: Literal["equal", "sum", "mean", "max", "rms"] = "equal"
    form: Literal["number", "percent", "exponent", "count"] = "number"
    short: str = ""  # in a line of plain text; "": not there
    digits: int = 3  # in that line


def _mean(numbers: list[float], weights: RankWeights) -> float:
    return sum(n * w for n, w in zip(numbers, weights)) / sum(weights)


def _root_mean_square(numbers: list[float], weights: RankWeights) -> float:
    return math.sqrt(_mean([n * n for n in numbers], weights))


def _largest(numbers: list[float], weights: RankWeights) -> float:
    return max((n for n in numbers if not math.isnan(n)), default=math.nan)


def _sum(numbers: list[float], weights: RankWeights) -> float:
    return sum(numbers)


_REDUCTIONS: dict[str, Callable[[list[float], RankWeights], float]] = {
    "sum": _sum,
    "mean": _mean,
    "max": _largest,
    "rms": _root_mean_square,
}


def combine(
    row: dict[str, float], declared: Iterable[Metric], ranks: Ranks, num_envs: int, device: torch.device
) -> dict[str, float]:
    """The row of the whole run: sums, means weighted by environments, or the largest, as each metric declares."""
    if not ranks.joined:
        return row
    reductions = {m.key: _REDUCTIONS[m.over_ranks] for m in declared if m.over_ranks != "equal" and m.key in row}
    with span("metrics of all ranks"):
        columns = zip(*ranks.all_gather([float(row[name]) for name in reductions], device))
    weights = [len(ranks.share(num_envs, rank)) for rank in range(ranks.size)]
    whole = {name: reductions[name](list(numbers), weights) for name, numbers in zip(reductions, columns)}
    counts = {name: int(whole[name]) for name in reductions if isinstance(row[name], int)}
    return {**row, **whole, **counts}


def episodes(
    ranks: Ranks, returns: Sequence[float], lengths: Sequence[int], keep: int, device: torch.device
) -> tuple[Sequence[float], Sequence[int]]:
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
