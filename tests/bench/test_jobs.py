"""Which runs a command consists of, and when a result counts for one."""

from __future__ import annotations

import pytest

from bench.finished_runs import SMALL, small_suite
from holdfast.bench.jobs import jobs
from holdfast.bench.suite import SuiteError


def test_runs_go_seed_by_seed_over_tasks_and_cores():
    suite = small_suite()
    found = jobs(suite, suite.tasks[:2], device="cpu", seeds=(4, 5))
    names = [(job.seed, job.task, job.core) for job in found]
    one_seed = [("A", "gru"), ("A", "none"), ("B", "gru"), ("B", "none")]
    assert names == [(seed, *rest) for seed in (4, 5) for rest in one_seed]
    assert {job.config["threads"] for job in found} == {1}


def test_steps_are_the_commands_or_the_tasks_or_the_suites():
    suite = small_suite()
    assert [job.steps for job in jobs(suite, suite.tasks, device="cpu", cores=("gru",))] == [1000, 1000, 500]
    assert {job.steps for job in jobs(suite, suite.tasks, device="cpu", steps=70)} == {70}


def test_the_longest_runs_of_a_seed_begin_first():
    tasks = [{**task, "steps": steps} for task, steps in zip(SMALL["tasks"], (10, 30, 20))]
    suite = small_suite(tasks=tasks)
    found = jobs(suite, suite.tasks, device="cpu", cores=("gru",), seeds=(1, 2))
    assert [(job.seed, job.task) for job in found] == [(1, "B"), (1, "C"), (1, "A"), (2, "B"), (2, "C"), (2, "A")]


def test_tuned_runs_use_the_settings_of_the_family_and_leave_other_tasks_out():
    suite = small_suite()
    tuned = jobs(suite, suite.tasks, device="cpu", cores=("lru",), tuned=True)
    assert [(job.task, job.config["gamma"], job.setting) for job in tuned] == [("A", 0.5, "tuned"), ("C", 0.5, "tuned")]
    with pytest.raises(SuiteError, match="no tuned settings for these tasks; leave out --tuned"):
        jobs(suite, suite.tasks[1:2], device="cpu", tuned=True)


def test_settings_of_the_command_are_in_every_run_over_those_of_the_suite():
    suite = small_suite(settings={"gamma": 0.9, "epochs": 2})
    changed = {"num_envs": 512, "gamma": 0.8}
    found = jobs(suite, suite.tasks, device="cpu", changed=changed)
    assert {(job.config["gamma"], job.config["num_envs"], job.config["epochs"]) for job in found} == {(0.8, 512, 2)}
    assert {job.setting for job in found} == {"gamma=0.8 num_envs=512"}
    (tuned,) = {job.setting for job in jobs(suite, suite.tasks, device="cpu", tuned=True, changed=changed)}
    assert tuned == "tuned gamma=0.8 num_envs=512"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_env": 4}, r"--set: unknown settings \['num_env'\]"),
        ({"num_envs": "many"}, "--set: num_envs='many' is not a value of its type"),
        ({"seed": 4}, "--set: seed is not among the settings of a suite; it is a key or a flag of its own"),
    ],
)
def test_a_setting_of_the_command_that_cannot_be_is_named(changed, says):
    suite = small_suite()
    with pytest.raises(SuiteError, match=says):
        jobs(suite, suite.tasks, device="cpu", changed=changed)


def test_a_core_that_does_not_exist_is_named():
    suite = small_suite()
    with pytest.raises(SuiteError, match="task A: core='grue' must be one of lstm, gru"):
        jobs(suite, suite.tasks, device="cpu", cores=("grue",))


def test_another_setting_makes_another_run_and_the_way_it_is_kept_does_not():
    suite = small_suite()
    (job,) = jobs(suite, suite.tasks[:1], device="cpu", cores=("gru",))
    again = jobs(suite, suite.tasks[:1], device="cpu", cores=("gru",))[0]
    assert job.id == again.id and job.id.startswith("A-gru-seed1-default-")
    changed = small_suite(settings={"gamma": 0.9})
    others = [
        jobs(changed, changed.tasks[:1], device="cpu", cores=("gru",))[0],
        jobs(suite, suite.tasks[:1], device="cuda", cores=("gru",))[0],
        jobs(suite, suite.tasks[:1], device="cpu", cores=("gru",), seeds=(2,))[0],
        jobs(suite, suite.tasks[:1], device="cpu", cores=("gru",), steps=999)[0],
    ]
    assert len({job.id, *(other.id for other in others)}) == 5
    kept = small_suite(settings={"checkpoint_every": 7})
    assert jobs(kept, kept.tasks[:1], device="cpu", cores=("gru",))[0].id == job.id


def test_ids_are_names_of_folders():
    suite = small_suite(tasks=[{**SMALL["tasks"][1], "name": "../Cart Pole, all/observed"}], tuned={})
    (job,) = jobs(suite, suite.tasks, device="cpu", cores=("my_module:MyCore",))
    assert job.id.startswith(".._Cart_Pole_all_observed-MyCore-seed1-default-")
    assert "/" not in job.id
