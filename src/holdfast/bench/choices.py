"""When a result is out of date: the suite asks for other settings now, or the run would choose others itself.

What a run chooses are the sizes and inputs that its settings leave open.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any

from gymnasium.envs.registration import load_env_creator

from holdfast.algorithms import algorithm_class
from holdfast.algorithms.auto_sizes import choose_inputs
from holdfast.algorithms.base import Task
from holdfast.bench.jobs import Job, jobs
from holdfast.bench.results import Row
from holdfast.bench.settings import TUNED
from holdfast.bench.suite import Suite
from holdfast.config import RunConfig, names_about
from holdfast.envs.catalog import list_envs


def is_current(job: Job, row: Row) -> bool:
    """Whether a result of this job was made with what the run would choose now. Known for Holdfast's environments only."""
    entry_points = {env.id: env.entry_point for env in list_envs()}
    config = RunConfig.from_dict(job.config, allow_imports=True)
    if config.env not in entry_points or not row.get("config"):
        return True
    task = Task(config.device.startswith("cuda"), fast_env=True)
    kind = algorithm_class(config.algorithm)
    chosen, _ = kind.choose_sizes(config, task)
    chosen = choose_inputs(chosen, _Named(entry_points[config.env]), config.policy is not None, kind.inputs)
    found = chosen.to_dict()
    return all(found[name] == row["config"].get(name) for name in (*names_about(type(config), "size"), "inputs"))


def of_the_suite(suite: Suite, rows: Iterable[Row], known: Collection[str] = ()) -> tuple[list[Row], int]:
    """The rows of runs that the suite consists of now, of any core, seed and device, and the number of other results of
    its tasks. Those were made before a task's environment or settings changed. known: ids of such runs."""
    names, kept, others = {task.name for task in suite.tasks}, [], 0
    for row in (row for row in rows if row["task"] in names):
        if row["id"] in known or row["id"] == _id_now(suite, row):
            kept.append(row)
        elif "final" in row:
            others += 1
    return kept, others


def _id_now(suite: Suite, row: Row) -> str | None:
    """The id that the run of a row has in the suite as it is; None if it is none of its runs."""
    setting, config = row["setting"], row.get("config", {})
    changed = {name: config[name] for name in re.findall(r"(?:^| )(\w+)=", setting) if name in config}
    try:
        found = jobs(
            suite,
            suite.pick((row["task"],)),
            device=str(config.get("device", "cpu")),
            cores=(row["core"],),
            seeds=(row["seed"],),
            steps=row["steps"],
            tuned=setting.partition(" ")[0] == TUNED,
            changed=changed,
        )
    except ValueError:  # settings that the suite, or this version, does not have
        return None
    same = (job for job in found if (job.task, job.core) == (row["task"], row["core"]))
    return next((dataclasses.replace(job, setting=setting).id for job in same), None)


class _Named:
    """An environment that is not made: what its class says of it."""

    def __init__(self, entry_point: str) -> None:
        kind: Any = load_env_creator(entry_point)
        self.metadata = {"inputs": kind.inputs}
