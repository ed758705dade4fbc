"""`Sweep`: the search, then a second look at the best settings on fresh seeds, then the winner as a preset.

All processes of a sweep do the same: they take trials from a shared study until none is left. Nobody is in charge, so any of
them may be killed, and others may join.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.config import RunConfig, names_about
from holdfast.runs.writing import write_whole
from holdfast.sweep.space import Space, default_space, read_space, write_space
from holdfast.sweep.study import Outcome, Study
from holdfast.sweep.trial_run import Objective, OutOfTimeError, deadline_after, run_trial

SECONDS_BETWEEN_LOOKS = 0.5
SEARCH_SHARE = 0.8  # of the time; the rest is for fresh seeds
FINALISTS = 3  # settings that are tried on fresh seeds, trial 0 included
FRESH = 1_000  # the first fresh seed is so far from the seed of the search
SPACE_NAME, BEST_NAME = "space.json", "best.json"


@dataclass
class Sweep:
    """base: the settings of trial 0, with all sizes. folder: runs and results. url: the database, of `name` in it.

    trials: of the whole study, however many processes and days it takes. seeds: fresh ones for the finalists. worker: the
    number of this process among those of one command. notify: shows the user a line. may_continue: asked after each update.
    """

    base: RunConfig
    space: Space
    folder: Path
    url: str
    name: str
    trials: int
    seeds: int = 3
    objective: Objective = "area"
    pruning: bool = True
    worker: int = 0
    seconds: float | None = None
    notify: Callable[[str], None] = print
    may_continue: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self.space = tuple(parameter.including(getattr(self.base, parameter.name)) for parameter in self.space)
        now = time.monotonic()
        self._deadline = deadline_after(self.seconds)
        self._search_deadline = now + SEARCH_SHARE * (self._deadline - now) if self.seeds else self._deadline
        space = {parameter.name: parameter.to_data() for parameter in self.space}
        facts = {"settings": _compared(self.base), "objective": self.objective, "space": space}
        self.search = self._study(self.name, facts)
        self.finals = self._study(f"{self.name}: fresh seeds", facts)
        self._seen: set[int] = set()

    def _study(self, name: str, facts: dict[str, Any]) -> Study:
        seed = self.base.seed + 7919 * self.worker  # each process samples other settings
        return Study(self.url, name, self.space, facts, seed, startup=max(4, min(10, self.trials // 4)))

    # --- work --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take trials until the sweep is done, here and elsewhere, or until its time is over."""
        with suppress(OutOfTimeError):
            if (0, None) not in self.search.known():
                self.search.queue(0, vars(self.base))
            self._work(self.search, self.trials, self._search_deadline, self.pruning)
            self._queue_finals()
            self._work(self.finals, None, self._deadline, pruning=False)

    def _work(self, study: Study, trials: int | None, deadline: float, pruning: bool) -> None:
        def must_stop() -> bool:
            return time.monotonic() > deadline or not self.may_continue()

        while True:
            if not self.may_continue():
                raise OutOfTimeError
            if time.monotonic() > deadline:
                return
            trial = study.take(trials)
            if trial is not None:
                try:
                    run_trial(study, trial, self.base, self.folder, self.objective, pruning, must_stop)
                except OutOfTimeError:
                    if not self.may_continue():
                        raise
                    return
                self._report(study)
            elif study.num_open() == 0:
                return
            else:  # another process is still at work, or dies
                time.sleep(SECONDS_BETWEEN_LOOKS)
                self._report(study)

    def _queue_finals(self) -> None:
        """Trial 0 and the best other settings, once per fresh seed."""
        outcomes = {outcome.index: outcome for outcome in self.search.outcomes()}
        if 0 in outcomes and outcomes[0].state == "failed":
            raise ValueError(f"the settings that the sweep starts from do not train: {outcomes[0].error}")
        known = self.finals.known()
        for outcome in self._finalists():
            for seed in self._fresh_seeds():
                if (outcome.index, seed) not in known:
                    self.finals.queue(outcome.index, {**vars(self.base), **outcome.settings}, seed=seed)

    def _finalists(self) -> list[Outcome]:
        found = [outcome for outcome in self.search.outcomes() if outcome.score is not None]
        best = sorted((outcome for outcome in found if outcome.index), key=lambda o: -(o.score or 0.0))
        return [*(outcome for outcome in found if not outcome.index), *best][:FINALISTS]

    def _fresh_seeds(self) -> range:
        return range(self.base.seed + FRESH, self.base.seed + FRESH + self.seeds)

    def _report(self, study: Study) -> None:
        if study is not self.search:
            return
        outcomes = study.outcomes()
        scores = [outcome.score for outcome in outcomes if outcome.score is not None]
        for outcome in outcomes:
            if outcome.index not in self._seen:
                self._seen.add(outcome.index)
                result = outcome.state if outcome.score is None else f"{outcome.score:.4g}"
                best = f" (best {max(scores):.4g})" if scores else ""
                self.notify(
                    f"trial {outcome.index:<4} {result:>8}{best}  {outcome.error or _in_words(outcome.settings)}"
                )

    # --- results -----------------------------------------------------------------------------------------------------

    def fresh_scores(self) -> dict[int, list[float]]:
        """Scores on fresh seeds by index."""
        found: dict[int, list[float]] = {}
        for outcome in self.finals.outcomes():
            if outcome.score is not None:
                found.setdefault(outcome.index, []).append(outcome.score)
        return found

    def winner(self) -> Outcome:
        """The finalist with the best mean on fresh seeds; trial 0 unless another one is better. Without fresh seeds, the best."""
        found = {outcome.index: outcome for outcome in self.search.outcomes() if outcome.score is not None}
        if not found:
            raise ValueError("no trial has finished, so there is no best setting yet")
        fresh = {
            index: scores
            for index, scores in self.fresh_scores().items()
            if len(scores) >= self.seeds and index in found
        }
        if len(fresh) > 1:
            return found[max(fresh, key=lambda index: (np.mean(fresh[index]), -index))]
        return max(found.values(), key=lambda outcome: (outcome.score or 0.0, -outcome.index))

    def write_best(self) -> Path:
        """The winner as a file for `holdfast train --preset`: only what is not a default."""
        config = replace(self.base, **self.winner().settings).to_dict()
        left_out, defaults = names_about(type(self.base), "sample", "place"), type(self.base)().to_dict()
        settings = {name: value for name, value in config.items() if name not in left_out and value != defaults[name]}
        path = self.folder / BEST_NAME
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(
            path,
            [
                (
                    json.dumps({"env": self.base.env, "algorithm": self.base.algorithm, **settings}, indent=1) + "\n"
                ).encode()
            ],
        )
        return path


def space_of(folder: Path, given: Path | None, base: RunConfig) -> Space:
    """The search space: of the file that is given, of the sweep's folder, or the default, which is written there."""
    own = folder / SPACE_NAME
    if given is not None:
        return read_space(given, type(base))
    if own.is_file():
        return read_space(own, type(base))
    write_space(default_space(base), own)
    return read_space(own, type(base))  # as later commands read it


def _compared(base: RunConfig) -> dict[str, Any]:
    """What all processes of a study must have in common."""
    left_out = names_about(type(base), "place")
    return {name: value for name, value in base.to_dict().items() if name not in left_out}


def _in_words(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    )
