"""A result is made again when a run would choose other sizes or inputs now, or when its suite has changed."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from bench.finished_runs import row, small_suite
from holdfast.bench.choices import is_current, of_the_suite
from holdfast.bench.jobs import Job, jobs

TASK = {"name": "A", "env": "holdfast/RepeatFirstEasy-v0", "low": 0, "high": 1}


def job(**settings: Any) -> Job:
    suite = small_suite(tasks=[TASK], tuned={}, settings=settings)
    return jobs(suite, suite.tasks, device="cpu", cores=("gru",))[0]


def result_of(job: Job, folder: Any, **changes: Any) -> dict[str, Any]:
    """What the trainer really chooses for this job, as a line of results."""
    config = hf.TrainConfig.from_dict({**job.config, "run_dir": str(folder)})
    return row("A", "gru", 1, 0.0, 0.0, config={**hf.Trainer(config).config.to_dict(), **changes})


@pytest.mark.parametrize("settings", [{}, {"num_envs": 4}, {"inputs": ["obs"]}, {"epochs": 3, "bptt": 16}], ids=str)
def test_a_result_of_this_version_counts(settings, tmp_path):
    assert is_current(job(**settings), result_of(job(**settings), tmp_path / "run"))


@pytest.mark.parametrize("changes", [{"inputs": ["obs"]}, {"num_envs": 7}, {"minibatches": 1}, {"epochs": 1}], ids=str)
def test_a_result_that_chose_otherwise_does_not(changes, tmp_path):
    assert not is_current(job(), result_of(job(), tmp_path / "run", **changes))


def test_results_of_other_environments_and_without_a_config_are_taken_as_they_are():
    suite = small_suite(tasks=[{**TASK, "env": "CartPole-v1"}], tuned={})
    other = jobs(suite, suite.tasks, device="cpu", cores=("gru",))[0]
    assert is_current(other, row("A", "gru", 1, 0.0, 0.0, config={"num_envs": 3}))
    assert is_current(job(), row("A", "gru", 1, 0.0, 0.0))


COMMANDS: list[dict[str, Any]] = [
    {},
    {"device": "cuda", "cores": ("lru",), "seeds": (7,), "steps": 77},
    {"tuned": True},
    {"changed": {"head_sizes": [64, 64], "gamma": 1, "lr_schedule": "constant"}},
    {"tuned": True, "changed": {"env_kwargs": {"length": 3}, "target_kl": None}},
]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_results_of_a_suite_are_out_of_date_when_its_task_changes(command: dict[str, Any]):
    suite = small_suite()
    made = jobs(suite, suite.tasks[:1], **{"device": "cpu", "cores": ("gru",), **command})[0]
    facts = {name: getattr(made, name) for name in ("id", "steps", "setting", "config")}
    rows = [row("A", made.core, made.seed, 0.0, 0.0, **facts)]
    assert of_the_suite(suite, rows) == (rows, 0)
    for task in ({"env": "Acrobot-v1"}, {"settings": {"value_coef": 0.25}}):
        entry = {"name": "A", "env": "holdfast/TMaze-v0", "family": "F", **task}
        other = small_suite(tasks=[entry], published={})
        assert of_the_suite(other, rows) == ([], 1)
        assert of_the_suite(other, rows, known={made.id}) == (rows, 0)
    elsewhere = small_suite(tasks=[{"name": "B", "env": "CartPole-v1"}], published={}, tuned={})
    assert of_the_suite(elsewhere, rows) == ([], 0)


def test_a_result_whose_settings_this_version_does_not_have_is_out_of_date():
    rows = [row("A", "gru", 1, 0.0, 0.0, config={"gamma": 5}, setting="gamma=5"), row("A", "no such core", 1, 0.0, 0.0)]
    assert of_the_suite(small_suite(), rows) == ([], 2)
