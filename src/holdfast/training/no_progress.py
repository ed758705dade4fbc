"""Says once if a run has learned nothing in its first two thirds, or ended no episode, and what helped in stuck runs.

The runs behind the remedies are in benchmarks/results/tuning.jsonl, and docs/training.md shows them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.config import RunConfig

SHARE = 2 / 3  # of the run's steps; a run of TMaze that ended well had learned nothing after 60%
UPDATES = 20  # a run of fewer has hardly begun
EPISODES = 100  # at the beginning, whose mean is compared with that of the latest
PART_OF_DEVIATION = 0.25  # an improvement smaller than this part of the deviation between episodes is none


class ProgressCheck:
    """`after_update` gives the warning, or None. advice: what to try, from the algorithm.

    first_returns: where the returns of the run's first episodes are kept, those from before a resume included. None: they
    are not known, and nothing is said.
    """

    def __init__(self, config: RunConfig, advice: Callable[[Any], str], first_returns: list[float] | None) -> None:
        self.config, self._advice = config, advice
        self._first = [] if first_returns is None else first_returns
        self._said = first_returns is None

    def after_update(self, row: dict[str, float], returns: Sequence[float]) -> str | None:
        """row: the metrics of an update, of all ranks; returns: those of the episodes that ended in it here."""
        self._first += returns[: max(0, EPISODES - len(self._first))]
        due = row["steps"] >= SHARE * self.config.total_steps and row["update"] >= UPDATES
        if self._said or not due:
            return None
        now = row["rollout/ep_rew_mean"]
        if not self._first and math.isnan(now):
            self._said = True
            return (
                f"no episode has ended in {row['steps']:,.0f} steps, so there is no return to show, and the evaluation at the end "
                "gives up after many steps; give the environment a time limit (gymnasium.wrappers.TimeLimit)"
            )
        if len(self._first) < 2:
            return None
        self._said = True
        start, deviation = statistics.fmean(self._first), statistics.stdev(self._first)
        if now - start > PART_OF_DEVIATION * deviation:
            return None
        return (
            f"nothing learned in the first two thirds of the run: the mean return is {now:.4g}, and it was {start:.4g} at the "
            f'beginning. {self._remedy()} See docs/training.md, "Nothing is learned".'
        )

    def _remedy(self) -> str:
        if self.config.core == "none" and self.config.policy is None:
            return "The policy has no memory (--core none); if the task needs one, try --core lstm."
        return self._advice(self.config)
