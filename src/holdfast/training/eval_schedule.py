"""When a run evaluates if `eval_every` is None: up to 20 times, as far as a small share of its steps pays for.

It counts steps and does not look at the clock: a resumed run evaluates where one that never stopped does. Half as many
environments as in training play one episode each. A step of theirs takes no longer than one of training and its share of the update.
"""

from __future__ import annotations

from holdfast.runs.record import stride
from holdfast.training.iteration import RunProgress

SHARE = 0.025
"""Of a run's environment steps. With half the environments at a time, this is 5% of the calls of `env.step`, without updates."""
MOST = 20
SHORTEST_RUN = 10_000
"""Environment steps; a shorter run is not evaluated before its end."""


class EvalSchedule:
    """num_envs: in this process; num_steps: of a rollout; eval_envs: None for half as many."""

    def __init__(self, progress: RunProgress, num_envs: int, num_steps: int, eval_envs: int | None = None) -> None:
        self.progress, self.num_steps = progress, num_steps
        self.episodes = eval_envs or -(-num_envs // 2)
        self.share = SHARE * min(2.0, num_envs / self.episodes)  # of the steps of one environment

    @property
    def left(self) -> int:
        """Steps that each environment may still play."""
        progress = self.progress
        return int(self.share * progress.num_updates * self.num_steps) - progress.eval_steps

    def is_due(self) -> bool:
        """After an update. Evaluations are spread evenly over the rest of the run, and the last one is after the last update."""
        done, lengths = self.progress, self.progress.recent_lengths
        if not lengths:
            return False
        longest, growth = max(lengths), max(lengths) - min(lengths)  # later episodes may be that much longer
        kept = stride(done.num_updates)  # of the rows of a long record
        if done.update == done.num_updates - done.num_updates % kept:
            return self.left >= longest
        affordable = 1 + (self.left - longest - growth) // longest  # with the last one
        since, rest = done.update - done.last_eval, done.num_updates - done.last_eval
        return (
            affordable >= 2
            and done.update % kept == 0
            and since * affordable >= rest
            and since * MOST >= done.num_updates
        )
