"""Warnings for when "the RNN does not learn", from the metrics of an update. Nothing here changes the run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import spaces

from holdfast.algorithms.base import Algorithm
from holdfast.config import RunConfig
from holdfast.policies.action_parts import has_parts, part_spaces
from holdfast.rollout.segment import Segment
from holdfast.training.iteration import SATURATED


class Warnings:
    """Gives each warning once. first_returns: as in `ProgressCheck`."""

    def __init__(
        self, algorithm: Algorithm, action_space: spaces.Space[Any] | None, first_returns: list[float] | None
    ) -> None:
        self.config: RunConfig = algorithm.config
        self._entropy_setting = "target_entropy" if hasattr(self.config, "target_entropy") else "entropy_coef"
        self.max_entropy = _max_entropy(action_space)
        self._said: set[str] = set()
        self._progress = ProgressCheck(self.config, algorithm.advice, first_returns)

    def after_update(self, row: dict[str, float], segment: Segment) -> list[str]:
        found = []
        saturation = row.get("memory/saturation", 0.0)
        if saturation > 0.5:
            found.append(
                (
                    "saturation",
                    f"{saturation:.0%} of the memory's units are saturated (|h| > {SATURATED}): gradients barely pass. "
                    "Try a lower learning rate, normalize_obs, or a smaller max_grad_norm.",
                )
            )
        if row.get("memory/nan", 0.0) > 0:
            found.append(("nan", "the memory holds NaN or Inf. hf.debug(True) finds the environment and step."))
        entropy = row.get("train/entropy", math.nan)
        young = row.get("steps", 0) < 0.2 * self.config.total_steps
        if young and self.max_entropy and entropy < 0.02 * self.max_entropy:
            found.append(
                (
                    "entropy",
                    f"the policy has almost stopped exploring (entropy {entropy:.3f} of {self.max_entropy:.2f}) in "
                    f"the first fifth of the run. Raise {self._entropy_setting} or lower learning_rate.",
                )
            )
        length = getattr(self.config, "train_length", self.config.sequence_length)
        episode = row.get("rollout/ep_len_mean", 0.0)
        if self.config.core != "none" and episode > 2 * length:
            found.append(
                (
                    "bptt",
                    f"episodes last {episode:.0f} steps on average, but gradients reach only {length} steps back. "
                    f"If the task needs longer memory, raise {self._raises()}.",
                )
            )
        stuck = self._progress.after_update(row, segment.episode_returns)
        if stuck is not None:
            found.append(("progress", stuck))
        new = [text for name, text in found if name not in self._said]
        self._said |= {name for name, _ in found}
        return new

    def _raises(self) -> str:
        """The settings on which the reach of gradients depends."""
        if hasattr(self.config, "train_length"):
            return "train_length"
        return "num_steps or bptt" if self.config.sequence_length < self.config.num_steps else "num_steps"


def _max_entropy(space: spaces.Space[Any] | None) -> float | None:
    if has_parts(space):
        of_parts = list(map(_max_entropy, part_spaces(space)))
        return None if None in of_parts else sum(part for part in of_parts if part is not None)
    if isinstance(space, spaces.Discrete):
        return math.log(max(2, int(space.n)))
    if isinstance(space, spaces.MultiDiscrete):
        return float(sum(math.log(max(2, int(n))) for n in space.nvec.flatten()))
    if isinstance(space, spaces.MultiBinary):
        return math.log(2) * math.prod(space.shape)
    return None


# --- no progress -----------------------------------------------------------------------------------------------------
# Says once if a run has learned nothing in its first two thirds, or ended no episode, and what helped in stuck runs.
#
# The runs behind the remedies are in benchmarks/results/tuning.jsonl, and docs/training.md shows them.


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
