"""The runs of a suite: which task, core, seed and settings. It trains nothing.

A run's id ends in a digest of all settings that it asks for, defaults included. A result counts for a command only if the
digest is the same, so results of other settings, or of a version with other defaults, are never taken for its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.bench.settings import name_of
from holdfast.bench.suite import Suite, SuiteError, SuiteTask, check_settings
from holdfast.config import config_class, names_about
from holdfast.config.run import BEFORE_ALGORITHMS


@dataclass(frozen=True)
class Job:
    """One run. setting: the name of its settings, "default" for the suite's."""

    suite: str
    task: str
    core: str
    seed: int
    steps: int
    setting: str
    config: dict[str, Any]
    deterministic: bool = False

    @property
    def id(self) -> str:
        """Also the name of the run's folder."""
        left_out = names_about(config_class(self.config["algorithm"]), "upkeep", "place") - {"device"}
        asked = {name: value for name, value in self.config.items() if name not in left_out}
        digest = hashlib.sha256(json.dumps([self.task, asked], sort_keys=True).encode()).hexdigest()[:10]
        words = (self.task, self.core.rpartition(":")[2], f"seed{self.seed}", self.setting[:40], digest)
        return "-".join(re.sub(r"[^\w.]+", "_", word) for word in words)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def jobs(
    suite: Suite,
    tasks: Sequence[SuiteTask],
    *,
    device: str,
    cores: Sequence[str] = (),
    seeds: Sequence[int] = (1,),
    steps: int | None = None,
    tuned: bool = False,
    changed: Mapping[str, Any] | None = None,
) -> list[Job]:
    """All runs, seed by seed, so that the first seed of every task is done first; within a seed the longest first, so
    that workers end at about the same time. changed: settings of all runs, over those of the suite."""
    check_settings(dict(changed or {}), "--set")
    if tuned:
        tasks = [task for task in tasks if task.family in suite.tuned]
        if not tasks:
            raise SuiteError(f"suite {suite.name} has no tuned settings for these tasks; leave out --tuned")
    return [
        _job(suite, task, core, seed, suite.steps_of(task, steps), device, tuned, changed or {})
        for seed in seeds
        for task in sorted(tasks, key=lambda task: -suite.steps_of(task, steps))
        for core in task.cores or cores or suite.cores
    ]


def require_known_envs(jobs: Sequence[Job], where: str) -> None:
    """Refuse an environment that does not exist, before anything trains. where: the file, for messages.

    It imports the modules that ids name, so the user must have allowed that. Suites in JAX are left to the runs: importing
    JAX takes long, and it may claim the GPU.
    """
    from holdfast.config.imports import JAX_SUITES
    from holdfast.envs import bridge

    for env, task in {job.config["env"]: job.task for job in reversed(jobs)}.items():
        if env.partition(":")[0] in JAX_SUITES:
            continue
        try:
            bridge.find(env)
        except (ValueError, ImportError) as error:
            raise SuiteError(f"{where}, task {task}: {error}") from error


def _job(
    suite: Suite,
    task: SuiteTask,
    core: str,
    seed: int,
    steps: int,
    device: str,
    tuned: bool,
    changed: Mapping[str, Any],
) -> Job:
    settings = {**suite.settings, **task.settings, **(suite.tuned[task.family] if tuned else {}), **changed}
    try:
        config = config_class(settings.get("algorithm", BEFORE_ALGORITHMS))(
            env=task.env,
            core=core,
            total_steps=steps,
            seed=seed,
            device=device,
            threads=1 if device == "cpu" else None,
            quiet=True,
            tensorboard=False,
            **settings,
        )
    except ValueError as error:
        raise SuiteError(f"task {task.name}: {error}") from error
    return Job(
        suite=suite.name,
        task=task.name,
        core=core,
        seed=seed,
        steps=steps,
        setting=name_of(tuned, changed),
        config=config.to_dict(),
        deterministic=suite.deterministic,
    )
