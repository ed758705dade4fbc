"""What a run's folder says about the weights of a policy: settings, steps, learning curve, result.

Only of these very weights: a policy that was trained further elsewhere has no record there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holdfast.config import RunConfig
from holdfast.policies.base import RecurrentPolicy
from holdfast.runs import checkpoint, saved_policy
from holdfast.runs.log import RESULT_NAME, read_progress

METRIC = "rollout/ep_rew_mean"
MOST_POINTS = 500  # of a learning curve


@dataclass
class TrainingRecord:
    """curve: (steps, mean return) up to these weights. result: of the final evaluation, if it was of these weights."""

    run: Path
    config: RunConfig
    steps: int
    spaces: tuple[Any, Any]
    curve: list[tuple[int, float]]
    result: dict[str, Any] | None


def find_record(policy: RecurrentPolicy, run: Path) -> TrainingRecord | None:
    """The record of the checkpoint that holds these weights; None if none of the run's does."""
    weights = {name: tensor.detach().cpu() for name, tensor in policy.state_dict().items()}
    best = checkpoint.folder_of(run) / "best.pt"
    for file in [*reversed(checkpoint.rolling(run)), *([best] if best.is_file() else [])]:
        _, saved = saved_policy.read(file)
        if _equal(saved["policy"], weights):
            config = saved_policy.settings(file, saved)
            steps = int(saved["steps"])
            # Folders and names say something about the machine, and nothing about the policy. A text that the environment
            # takes may be a path or a token.
            told = {name: value for name, value in config.env_kwargs.items() if _is_number(value)}
            config = replace(config, run_dir=None, name=None, threads=None, device="auto", env_kwargs=told)
            result = _result(run, steps, config.final_eval_episodes)
            return TrainingRecord(run, config, steps, saved_policy.spaces(saved), _curve(run, steps), result)
    return None


def _is_number(value: Any) -> bool:
    """Or several, or true, false and none."""
    return all(map(_is_number, value)) if isinstance(value, list) else value is None or isinstance(value, (int, float))


def _equal(saved: Any, weights: dict[str, torch.Tensor]) -> bool:
    return (
        isinstance(saved, dict)
        and saved.keys() == weights.keys()
        and all(isinstance(saved[name], torch.Tensor) and torch.equal(saved[name], weights[name]) for name in weights)
    )


def _curve(run: Path, steps: int) -> list[tuple[int, float]]:
    rows = [row for row in read_progress(run) if float(row["steps"]) <= steps]
    points = [
        (int(float(row["steps"])), float(row[METRIC])) for row in rows if row.get(METRIC) not in (None, "", "nan")
    ]
    stride = -(-len(points) // MOST_POINTS) or 1
    return points[::-1][::stride][::-1]  # the last one is always there


def evaluation_data(mean_return: float, std_error: float, episodes: int) -> dict[str, Any] | None:
    """An evaluation with sampled actions as plain data; None if no episode ended, so that there is no mean."""
    if not math.isfinite(mean_return):
        return None
    error = std_error if math.isfinite(std_error) else None  # NaN for one episode
    return {"mean_return": mean_return, "std_error": error, "episodes": episodes, "deterministic": False}


def _result(run: Path, steps: int, asked_for: int) -> dict[str, Any] | None:
    try:
        result = json.loads((run / RESULT_NAME).read_text())
        if int(result["steps"]) != steps:
            return None
        mean, error = float(result["mean_return"]), float(result["std_error"])
        return evaluation_data(mean, error, int(result.get("episodes", asked_for)))  # 0.1 did not write their number
    except (OSError, ValueError, KeyError, TypeError):
        return None
