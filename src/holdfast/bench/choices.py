"""What a run chooses itself: the sizes and inputs that its settings leave open. A version that chooses otherwise makes results
of an earlier one out of date.
"""

from __future__ import annotations

from typing import Any

from gymnasium.envs.registration import load_env_creator

from holdfast.bench.jobs import Job
from holdfast.bench.results import Row
from holdfast.config import TrainConfig
from holdfast.envs.catalog import list_envs
from holdfast.training.chosen import SIZES, Task, choose_inputs, choose_sizes


def is_current(job: Job, row: Row) -> bool:
    """Whether a result of this job was made with what the run would choose now. Known for Holdfast's environments only."""
    entry_points = {env.id: env.entry_point for env in list_envs()}
    config = TrainConfig.from_dict(job.config)
    if config.env not in entry_points or not row.get("config"):
        return True
    chosen, _ = choose_sizes(config, Task(config.device.startswith("cuda"), fast_env=True))
    chosen = choose_inputs(chosen, _Named(entry_points[config.env]), own_policy=config.policy is not None)
    return all(_plain(getattr(chosen, name)) == row["config"].get(name) for name in (*SIZES, "inputs"))


class _Named:
    """An environment that is not made: what its class says of it."""

    def __init__(self, entry_point: str) -> None:
        kind: Any = load_env_creator(entry_point)
        self.metadata = {"inputs": kind.inputs}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
