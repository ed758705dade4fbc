"""Trials that several processes share: none is lost, none is done twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.sweep import study as study_module
from holdfast.sweep.space import Parameter
from holdfast.sweep.study import Study

pytest.importorskip("optuna")

SPACE = (
    Parameter("learning_rate", low=1e-4, high=1e-2, scale="log"),
    Parameter("gamma", low=0.9, high=0.99, scale="log(1-x)"),
    Parameter("core", choices=("lstm", "gru")),
    Parameter("num_layers", low=1, high=3, whole=True),
)
BASE = {"learning_rate": 1e-3, "gamma": 0.95, "core": "lstm", "num_layers": 2}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with tables and no trials; making them takes longer than most tests."""
    folder = tmp_path_factory.mktemp("empty")
    Study(f"sqlite:///{folder / 'study.db'}", "another", SPACE, {}, 1, startup=4)
    return folder / "study.db"


@pytest.fixture(autouse=True)
def database(tmp_path: Path, empty: Path) -> None:
    shutil.copy(empty, tmp_path / "study.db")


def open_study(folder: Path, name: str = "it", seed: int = 1, **facts: Any) -> Study:
    return Study(f"sqlite:///{folder / 'study.db'}", name, SPACE, facts, seed, startup=4)


def kill_owner(study: Study, trial: Any) -> None:
    """As if the process that has this trial were killed."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    owner = {**trial.user_attrs["owner"], "pid": child.pid}
    trial.set_user_attr("owner", owner)


def test_the_first_trial_has_the_settings_it_starts_from_and_the_others_stay_in_the_space(tmp_path: Path):
    study = open_study(tmp_path)
    study.queue(0, BASE)
    first = study.take(4)
    assert study.settings(first) == BASE
    study.complete(first, 0.5)
    for number in range(1, 4):
        trial = study.take(4)
        found = study.settings(trial)
        assert 1e-4 <= found["learning_rate"] <= 1e-2 and 0.9 <= found["gamma"] <= 0.99
        assert found["core"] in ("lstm", "gru") and found["num_layers"] in (1, 2, 3)
        study.complete(trial, number / 10)
    assert study.take(4) is None and study.num_open() == 0
    assert [(outcome.index, outcome.score) for outcome in study.outcomes()] == [(0, 0.5), (1, 0.1), (2, 0.2), (3, 0.3)]


def test_queued_settings_keep_all_their_digits(tmp_path: Path):
    study = open_study(tmp_path)
    exact = {**BASE, "learning_rate": 1.23456789e-3, "gamma": 0.987654321}
    study.queue(0, exact)
    study.put_back(study.take(1))
    trial = study.take(1)
    assert study.settings(trial) == exact
    study.complete(trial, 0.5)
    (outcome,) = study.outcomes()
    assert outcome.settings == exact


def test_several_workers_do_every_trial_once_and_no_more_than_asked_for(tmp_path: Path):
    open_study(tmp_path).queue(0, BASE)
    done: list[int] = []

    def work(seed: int) -> None:
        study = open_study(tmp_path, seed=seed)
        while (trial := study.take(12)) is not None:
            study.settings(trial)
            done.append(trial.user_attrs["index"])
            study.complete(trial, 0.0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes = open_study(tmp_path).outcomes()
    assert len(done) == len(set(done)) == len(outcomes) == 12


def test_processes_that_start_at_the_same_time_make_one_study(tmp_path: Path):
    problems: list[Exception] = []

    def start() -> None:
        try:
            open_study(tmp_path / "new")
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_database_that_cannot_be_opened_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (tmp_path / "study.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(ValueError, match=r"--storage sqlite:.* cannot be opened") as error:
        open_study(tmp_path)
    assert str(error.value).endswith("DatabaseError: file is not a database"), (
        "without Optuna's and SQLAlchemy's wrapping"
    )


def test_a_trial_whose_process_was_killed_is_done_again_with_the_same_settings(tmp_path: Path):
    study = open_study(tmp_path)
    study.queue(0, BASE)
    study.complete(study.take(3), 0.0)
    lost = study.take(3)
    settings = study.settings(lost)
    assert open_study(tmp_path).take(2) is None  # its process lives
    kill_owner(study, lost)
    again = open_study(tmp_path, seed=9).take(3)
    assert again.user_attrs["index"] == lost.user_attrs["index"] == 1
    assert study.settings(again) == settings
    study.complete(again, 0.7)
    assert [(outcome.index, outcome.score) for outcome in study.outcomes()] == [(0, 0.0), (1, 0.7)]
    assert study.take(3).user_attrs["index"] not in (0, 1)


def test_a_trial_whose_process_was_killed_before_the_trial_had_an_index_is_done_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(study_module, "SECONDS_BETWEEN_BEATS", -1)
    study = open_study(tmp_path)
    dead = study._study.ask()  # and killed here
    again = study.take(1)
    assert again.user_attrs["index"] == dead.number
    study.settings(again)
    study.complete(again, 1.0)
    assert [outcome.state for outcome in study.outcomes()] == ["complete"] and study.take(1) is None


def test_a_trial_of_another_machine_is_taken_over_when_it_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    study = open_study(tmp_path)
    study.queue(0, BASE)
    trial = study.take(1)
    trial.set_user_attr("owner", {**trial.user_attrs["owner"], "host": "elsewhere", "pid": os.getpid()})
    assert study.take(1) is None
    monkeypatch.setattr(study_module, "SECONDS_UNTIL_GONE", -1)
    assert study.take(1).user_attrs["index"] == 0


def test_a_process_that_was_killed_before_it_queued_a_trial_again_loses_nothing(tmp_path: Path):
    study = open_study(tmp_path)
    study.queue(0, BASE, seed=1001)
    trial = study.take(None)
    settings = study.settings(trial)
    study._study.tell(trial, state=study._optuna.trial.TrialState.FAIL)  # and killed here
    again = study.take(None)
    assert (again.user_attrs["index"], again.user_attrs["seed"]) == (0, 1001) and study.settings(again) == settings


def test_a_trial_that_kills_its_process_again_and_again_is_given_up(tmp_path: Path):
    study = open_study(tmp_path)
    study.queue(0, BASE)
    for _ in range(study_module.MOST_ATTEMPTS):
        trial = study.take(1)
        study.settings(trial)
        kill_owner(study, trial)
    assert study.take(1) is None
    (outcome,) = study.outcomes()
    assert outcome.state == "failed" and outcome.error == "its process died repeatedly"


def test_a_trial_that_is_put_back_goes_on_with_the_next_process(tmp_path: Path):
    study = open_study(tmp_path)
    study.queue(0, BASE)
    for _ in range(5):
        trial = study.take(1)
        assert study.settings(trial) == BASE
        study.put_back(trial)
    study.fail(study.take(1), "ValueError: no")
    assert study.take(1) is None
    assert [(o.state, o.error) for o in study.outcomes()] == [("failed", "ValueError: no")]


def test_a_process_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study_module, "SECONDS_BETWEEN_BEATS", 0.05)
    study = open_study(tmp_path)
    study.queue(0, BASE)
    trial = study.take(1)
    before = trial.user_attrs["owner"]["beat"]
    with study.beating(trial):
        until = time.monotonic() + 10
        while trial.user_attrs["owner"]["beat"] == before and time.monotonic() < until:
            time.sleep(0.05)
    assert trial.user_attrs["owner"]["beat"] > before


def test_a_study_goes_on_only_with_the_settings_it_was_started_with(tmp_path: Path):
    open_study(tmp_path, settings={"env": "a", "gamma": 0.9})
    open_study(tmp_path, settings={"env": "a", "gamma": 0.9})
    with pytest.raises(ValueError, match=r"the settings .* \(gamma 0.9, now 0.8\); .* --study NAME"):
        open_study(tmp_path, settings={"env": "a", "gamma": 0.8})


def test_importances_need_some_trials(tmp_path: Path):
    study = open_study(tmp_path)
    assert study.importances() == {}
    study.queue(0, BASE)
    while (trial := study.take(12)) is not None:
        study.complete(trial, study.settings(trial)["learning_rate"])
    found = study.importances()
    assert set(found) == {parameter.label for parameter in SPACE} and sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "settings",
    [
        {"env": "subprocess:getoutput"},
        {"core": "os:abort"},
        {"num_layers": 4},
        {"num_layers": 1.5},
        {"learning_rate": 1.0},
        {"learning_rate": "0.001"},
        {"gamma": True},
        ["core"],
    ],
)
def test_a_queued_trial_may_only_vary_what_the_search_space_varies(settings: Any, tmp_path: Path):
    study = open_study(tmp_path)
    study._study.enqueue_trial({}, user_attrs={"index": 0, "settings": settings})
    trial = study.take(1)
    with pytest.raises(ValueError, match=r"search space|num_layers is|learning_rate is|gamma is|settings is a list"):
        study.settings(trial)


@pytest.mark.parametrize("core", ['"os:abort"', "no JSON", 7])
def test_a_finished_trial_with_foreign_settings_is_no_result(core: Any, tmp_path: Path):
    import optuna

    study = open_study(tmp_path)
    foreign = {"core": optuna.distributions.CategoricalDistribution([core])}
    study._study.add_trial(optuna.create_trial(params={"core": core}, distributions=foreign, value=9.0))
    (outcome,) = study.outcomes()
    assert (outcome.score, outcome.state, outcome.settings) == (None, "failed", {}) and outcome.error


@pytest.mark.parametrize(
    "attributes", [{"index": "../../escape"}, {"index": 0, "seed": "/../../escape"}, {"index": -1}]
)
def test_an_index_or_seed_that_is_no_number_names_no_folder(attributes: dict[str, Any], tmp_path: Path):
    study = open_study(tmp_path)
    study._study.enqueue_trial({}, user_attrs=attributes)
    with pytest.raises(ValueError, match="of trial 0 in the study's database is"):
        study.take(1)


def test_the_lock_of_a_study_does_not_empty_a_file_that_it_is_a_link_to(tmp_path: Path):
    study = open_study(tmp_path)
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "study.db.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="this is a link, which is not followed"):
        study.take(1)
    assert (tmp_path / "precious").read_text() == "kept"
