"""How far a run is: counters, the returns of recent episodes, the clock. A checkpoint holds all of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

RECENT_EPISODES = 100
"""`rollout/ep_rew_mean` is over these."""


def _recent() -> deque[float]:
    return deque(maxlen=RECENT_EPISODES)


@dataclass
class RunProgress:
    """Counters of a run, those of its parts before a resume included."""

    update: int = 0  # finished updates
    steps: int = 0
    best_return: float = -float("inf")
    recent_returns: deque[float] = field(default_factory=_recent)
    recent_lengths: deque[float] = field(default_factory=_recent)
    first_returns: list[float] | None = field(default_factory=list)
    """Of the run's first episodes, for `no_progress`; None: resumed from a checkpoint that does not hold them."""
    earlier_seconds: float = 0.0  # before `start_clock`
    _began: float | None = None

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self.earlier_seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    def start_clock(self) -> None:
        self._began = time.perf_counter()

    def stop_clock(self) -> None:
        self.earlier_seconds, self._began = self.seconds, None

    def add_episodes(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        self.recent_returns.extend(returns[-RECENT_EPISODES:])
        self.recent_lengths.extend(lengths[-RECENT_EPISODES:])

    def reached(self, target: float | None) -> bool:
        """Whether the mean return of a full window of recent episodes is at least `target`."""
        full = len(self.recent_returns) == RECENT_EPISODES
        return target is not None and full and mean(self.recent_returns) >= target


def mean(values: deque[float]) -> float:
    """NaN for none."""
    return float(np.mean(values)) if values else float("nan")
