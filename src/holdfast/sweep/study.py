"""An Optuna study in a database that several processes and machines share, and who works on which trial.

A trial belongs to a process. If the process is gone, another one takes the trial over: it is marked as failed, which only one
process can do, and queued again with the same settings under the same index. So a trial of a sweep, its *index*, may be several
of Optuna's, of which all but the last have failed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import plain_checks
from holdfast.runs.lock import may_live, this_process
from holdfast.runs.writing import unlinked
from holdfast.sweep.database import is_in_memory, open_database, require_optuna
from holdfast.sweep.space import Parameter, Space

SECONDS_BETWEEN_BEATS, SECONDS_UNTIL_GONE = 10, 120
MOST_ATTEMPTS = 3
REPORTS = 20  # points of the learning curve that trials are compared at


@dataclass(frozen=True)
class Outcome:
    """A finished trial of a sweep."""

    index: int
    settings: dict[str, Any]
    score: float | None  # None if it was pruned or failed
    state: str  # "complete", "pruned" or "failed"
    error: str
    seed: int | None


class Study:
    """The trials of one sweep. facts: plain data that every process must agree on, such as the base settings."""

    def __init__(self, url: str, name: str, space: Space, facts: dict[str, Any], seed: int, startup: int) -> None:
        self._optuna = optuna = require_optuna()
        self.space, self.name = space, name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "experimental"
            self._storage = open_database(url)
            in_a_file = url.startswith("sqlite:///") and not is_in_memory(url)
            file = url.removeprefix("sqlite:///") if in_a_file else None
            self._lock_file = None if file is None else Path(f"{file}.lock")
            pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=REPORTS // 4, n_min_trials=3)
            self._study = optuna.create_study(
                study_name=name, storage=self._storage, pruner=pruner, direction="maximize", load_if_exists=True
            )
            # Started again, a process samples other settings than the first time.
            seed = (seed + 104_729 * len(self._trials())) % 2**31
            self._study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=startup, multivariate=True, constant_liar=True, seed=seed
            )
        self._agree(facts)

    def _agree(self, facts: dict[str, Any]) -> None:
        recorded = self._study.user_attrs
        for name, value in json.loads(json.dumps(facts)).items():
            if name not in recorded:
                self._study.set_user_attr(name, value)
            elif recorded[name] != value:
                raise ValueError(
                    f"the {name} of the study {self.name!r} changed ({_difference(recorded[name], value)}); continue it with "
                    "what it was started with, or start a new study: --study NAME"
                )

    # --- who does what -----------------------------------------------------------------------------------------------

    def queue(self, index: int, settings: dict[str, Any], **attributes: Any) -> None:
        """Let a process run these settings next, with all their digits."""
        exact = {parameter.name: settings[parameter.name] for parameter in self.space}
        params = {parameter.label: parameter.number(settings[parameter.name]) for parameter in self.space}
        self._study.enqueue_trial(params, user_attrs={"index": index, "settings": exact, **attributes})

    def take(self, trials: int | None) -> Any | None:
        """The next trial, which is now this process's: a queued one, or a new one while there are fewer than `trials`.

        None: queue only. Returns None if there is nothing to do.
        """
        with self._one_at_a_time():
            return self._take(trials)

    def _take(self, trials: int | None) -> Any | None:
        self._recover()
        states = self._optuna.trial.TrialState
        found = self._trials()
        if not any(trial.state == states.WAITING for trial in found) and len(_indices(found)) >= (trials or 0):
            return None
        trial = self._study.ask()
        trial.set_user_attr("owner", {**this_process(), "beat": time.time()})
        earlier = [other for other in self._trials() if other.number < trial.number]
        if "index" in trial.user_attrs:  # queued; twice, if two processes have found it at the same time
            surplus = any(key_of(other) == key_of(trial) and other.state != states.FAIL for other in earlier)
        else:
            surplus = len(_indices(earlier)) >= (trials or 0)  # another process was faster
        if surplus:
            trial.set_user_attr("surplus", True)
            self._study.tell(trial, state=states.FAIL)
            return self._take(trials)
        if "index" not in trial.user_attrs:
            trial.set_user_attr("index", trial.number)
        return trial

    def settings(self, trial: Any) -> dict[str, Any]:
        """What a trial tries; sampled here if it is a new one. A ValueError if it is not in the search space."""
        found = {parameter.name: parameter.setting(self._suggest(trial, parameter)) for parameter in self.space}
        return self._in_space({**found, **_queued(trial)})

    def _in_space(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Whoever can write the database can queue a trial and call it done. It may only vary what this command varies."""
        by_name = {parameter.name: parameter for parameter in self.space}
        for name, value in settings.items():
            if name not in by_name:
                raise ValueError(f"the study's database sets {name!r:.40}, which is not in the search space")
            by_name[name].require(value)
        return settings

    def _suggest(self, trial: Any, parameter: Parameter) -> Any:
        if parameter.choices:
            return trial.suggest_categorical(parameter.label, [json.dumps(choice) for choice in parameter.choices])
        low, high = parameter.bounds()
        log = parameter.scale != "linear"
        if parameter.whole:
            return trial.suggest_int(parameter.label, int(low), int(high), log=log)
        return trial.suggest_float(parameter.label, low, high, log=log)

    def complete(self, trial: Any, score: float) -> None:
        self._study.tell(trial, score)

    def prune(self, trial: Any) -> None:
        self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, trial: Any, error: str) -> None:
        trial.set_user_attr("error", error)
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def put_back(self, trial: Any) -> None:
        """Leave a trial that is not finished to the next process."""
        with self._one_at_a_time():
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            self._requeue(self._storage.get_trial(self._id_of(trial.number)), attempts=0)

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """SQLite does not lock what a process has read and is about to write, so two would take the same trial."""
        if self._lock_file is None:
            yield
            return
        with open(self._lock_file, "a+", opener=unlinked) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # until it is closed
            yield

    @contextlib.contextmanager
    def beating(self, trial: Any) -> Iterator[None]:
        """Tells other machines that this process lives."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(SECONDS_BETWEEN_BEATS):
                with contextlib.suppress(Exception):  # the database is busy, or gone for a moment
                    trial.set_user_attr("owner", {**this_process(), "beat": time.time()})

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _recover(self) -> None:
        """Queue again what processes that are gone have left: running, or failed without an error."""
        states, found = self._optuna.trial.TrialState, self._trials()
        for trial in found:
            if trial.state == states.RUNNING and _is_abandoned(trial):
                with contextlib.suppress(
                    self._optuna.exceptions.UpdateFinishedTrialError
                ):  # another process was faster
                    self._storage.set_trial_state_values(self._id_of(trial.number), states.FAIL)
        for last in self._left_behind():
            attempts = _attempts(last)
            if attempts < MOST_ATTEMPTS:
                self._requeue(last, attempts)

    def _left_behind(self) -> list[Any]:
        """The last attempts of trials that have failed without an error, and are not queued again."""
        failed, found = self._optuna.trial.TrialState.FAIL, self._trials()
        alive = {key_of(trial) for trial in found if trial.state != failed or "error" in trial.user_attrs}
        last = {key_of(trial): trial for trial in found if not _is_surplus(trial) and key_of(trial) not in alive}
        return list(last.values())

    def _requeue(self, trial: Any, attempts: int) -> None:
        kept = {name: value for name, value in trial.user_attrs.items() if name in ("seed", "settings")}
        params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        self._study.enqueue_trial(params, user_attrs={**kept, "index": key_of(trial)[0], "attempts": attempts})

    def _id_of(self, number: int) -> int:
        return int(
            self._storage.get_trial_id_from_study_id_trial_number(
                self._storage.get_study_id_from_name(self.name), number
            )
        )

    # --- what is known -----------------------------------------------------------------------------------------------

    def _trials(self) -> list[Any]:
        return self._study.get_trials(deepcopy=False)

    def num_open(self) -> int:
        """Trials that are queued or running, here or elsewhere."""
        states = self._optuna.trial.TrialState
        return sum(trial.state in (states.WAITING, states.RUNNING) for trial in self._trials())

    def known(self) -> set[tuple[int, int | None]]:
        """(index, seed) of all trials, whatever became of them."""
        return {key_of(trial) for trial in self._trials() if not _is_surplus(trial)}

    def outcomes(self) -> list[Outcome]:
        """The finished trials by index."""
        states, found = self._optuna.trial.TrialState, []
        given_up = {trial.number for trial in self._left_behind() if _attempts(trial) >= MOST_ATTEMPTS}
        for trial in self._trials():
            died = "its process died repeatedly" if trial.number in given_up else ""
            error = str(trial.user_attrs.get("error", died))
            failed = "failed" if error else ""
            state = {states.COMPLETE: "complete", states.PRUNED: "pruned", states.FAIL: failed}.get(trial.state)
            if state and not _is_surplus(trial):
                try:
                    sampled = {p.name: p.setting(trial.params[p.label]) for p in self.space if p.label in trial.params}
                    settings = self._in_space({**sampled, **_queued(trial)})
                except (ValueError, TypeError) as error_in_it:
                    settings, state, error = {}, "failed", error or str(error_in_it)
                index, seed = key_of(trial)
                if state == "complete" and len(settings) < len(self.space):
                    raise ValueError(
                        f"the study {self.name!r} cannot be used: it does not say which settings trial {index} had"
                    )
                score = trial.value if state == "complete" else None
                found.append(Outcome(index, settings, score, state, error, seed))
        return sorted(found, key=lambda outcome: (outcome.index, outcome.seed or 0))

    def importances(self) -> dict[str, float]:
        """What matters for being among the best trials, as shares of 1 (PED-ANOVA); {} if there are too few trials to say."""
        optuna = self._optuna
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                evaluator = optuna.importance.PedAnovaImportanceEvaluator()
                found = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
                return {p.label: found[p.label] for p in self.space if p.label in found}
            except (ValueError, RuntimeError):
                return {}


def _queued(trial: Any) -> dict[str, Any]:
    """The settings of a trial that was queued; a sampled one has none."""
    return plain_checks.mapping(trial.user_attrs.get("settings", {}), "settings")


def key_of(trial: Any) -> tuple[int, int | None]:
    """The index of a trial, and its seed if it is a fresh one. Folders are named after them."""
    index, seed = trial.user_attrs.get("index", trial.number), trial.user_attrs.get("seed")
    where = f"trial {trial.number} in the study's database"
    return (
        plain_checks.integer(index, f"the index of {where}", 0),
        None if seed is None else plain_checks.integer(seed, f"the seed of {where}", 0, 2**63 - 1),
    )


def _attempts(trial: Any) -> int:
    """Processes that have died over a trial, this one included."""
    return int(trial.user_attrs.get("attempts", 0)) + 1


def _is_surplus(trial: Any) -> bool:
    return bool(trial.user_attrs.get("surplus"))


def _indices(trials: list[Any]) -> set[int]:
    return {key_of(trial)[0] for trial in trials if not _is_surplus(trial)}


def _is_abandoned(trial: Any) -> bool:
    owner = trial.user_attrs.get("owner")
    if owner is None:  # killed between asking and saying so, or about to say so
        started = trial.datetime_start
        return started is not None and time.time() - started.timestamp() > SECONDS_BETWEEN_BEATS
    if owner.get("host") == this_process()["host"]:
        return not may_live(owner, has_locks=False)
    return bool(time.time() - owner["beat"] > SECONDS_UNTIL_GONE)


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        changed = [key for key in {**old, **new} if (key in old, old.get(key)) != (key in new, new.get(key))]
        before, now = (repr(data[changed[0]]) if changed[0] in data else "missing" for data in (old, new))
        return f"{changed[0]} {before}, now {now}"
    return f"{old!r}, now {new!r}"
