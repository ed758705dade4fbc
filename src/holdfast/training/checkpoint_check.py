"""Whether a checkpoint fits a run, checked before anything of the run is replaced.

A file whose digest is right may still hold anything: it may come from another program or another person. Every tensor is
compared with the part of the run that it will replace (name, shape, dtype), every number with its range.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces

from holdfast import plain_checks as check
from holdfast.envs.base import TorchVectorEnv
from holdfast.runs import rng_state, saved_policy, space_data
from holdfast.state import leaves

if TYPE_CHECKING:
    from holdfast.training.trainer import Trainer

MAX_THREADS = 1024


def check_before_building(saved: dict[str, Any]) -> None:
    """What a trainer is built from: numbers that decide how much memory and how many threads it takes."""
    check.integer(saved.get("threads"), "threads", 1, MAX_THREADS)
    if saved["config"].get("threads") is not None:
        check.integer(saved["config"]["threads"], "config threads", 1, MAX_THREADS)
    for name in ("update", "steps"):
        check.integer(saved[name], name, 0)
    rows = sum(_rows(part, where) for where, part in _collectors(saved))
    if rows != saved["config"].get("num_envs", rows):
        raise ValueError(f"it holds {rows} environments, its config says num_envs={saved['config']['num_envs']}")


def check_fit(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Everything that `run_state.restore` puts into the trainer."""
    adapter = trainer.collector.adapter
    for name, space in zip(("observation_space", "action_space"), saved_policy.spaces(saved)):
        space_data.require_fit(space, getattr(adapter, name), name)
    _check_weights(trainer, saved["policy"])
    name = trainer.algorithm.name
    trainer.algorithm.check(check.mapping(saved.get(name), name))
    for where, collector in _collectors(saved):
        _check_collector(trainer, collector, where)
    _check_reward_scale(saved.get("reward_scale"), _rows(saved["collector"], "collector"))
    check.number(saved["best_return"], "best_return")
    check.number(saved["seconds"], "seconds", 0, 1e12)
    for name in ("spoiled_updates", "last_eval", "eval_steps"):
        check.integer(saved.get(name, 0), name, 0)
    for name in ("recent_returns", "recent_lengths", "first_returns"):
        values = saved.get(name) if name == "first_returns" else saved[name]
        if values is not None:
            [check.number(value, name) for value in check.sequence(values, name) if not _is_nan(value)]
    parts = [saved, *check.sequence(saved.get("other_ranks", []), "other_ranks")]
    for rank, part in enumerate(parts):
        check.integer(part.get("env_failures", 0), "env_failures", 0)
        rng_state.check(part["rng"], f"rng of rank {rank}")
    for rank, part in enumerate(parts[1:], 1):
        check.mapping(part, f"rank {rank}", "generator", "open_return")
        check.generator_state(part["generator"], f"generator of rank {rank}")
        if trainer.algorithm.reward_scale is not None and part["open_return"] is not None:
            check.tensor(part["open_return"], "open_return", (_rows(part["collector"], "collector"),), torch.float64)


# --- parts -----------------------------------------------------------------------------------------------------------


def _check_weights(trainer: Trainer, saved: Any) -> None:
    """Names that are missing or unknown are `load_state_dict`'s to judge: a policy may know older names."""
    check.mapping(saved, "policy")
    for name, own in trainer.policy.state_dict().items():
        if name in saved:
            check.weight(saved[name], f"policy {name}", own)


def _collectors(saved: dict[str, Any]) -> list[tuple[str, Any]]:
    others = check.sequence(saved.get("other_ranks", []), "other_ranks")
    ranks = [("collector", saved["collector"])]
    for rank, part in enumerate(others, 1):
        ranks.append(
            (f"collector of rank {rank}", check.mapping(part, f"rank {rank}", "collector", "rng")["collector"])
        )
    return ranks


def _rows(collector: Any, where: str) -> int:
    """The number of environments that a saved collector has."""
    opened = check.mapping(collector, where, "started", "feed", "memory", "open_return", "open_length")["open_return"]
    if not isinstance(opened, torch.Tensor) or opened.dim() != 1:
        raise ValueError(f"{where} open_return is not a tensor with one number per environment")
    return len(opened)


def _check_collector(trainer: Trainer, saved: dict[str, Any], where: str) -> None:
    rows = _rows(saved, where)
    check.tensor(saved["open_return"], f"{where} open_return", (rows,), torch.float64)
    check.tensor(saved["open_length"], f"{where} open_length", (rows,), torch.int64)
    if not check.flag(saved["started"], f"{where} started"):
        return
    feed = check.mapping(saved["feed"], f"{where} feed", "env", "speaks_torch", "obs", "resets", "valid", "action_mask")
    check.flag(feed["speaks_torch"], f"{where} speaks_torch")
    for name in ("resets", "valid"):
        check.tensor(feed[name], f"{where} {name}", (rows,), torch.bool)
    if (mask := feed["action_mask"]) is not None:
        shape = mask.shape[1:] if isinstance(mask, torch.Tensor) else ()
        check.tensor(mask, f"{where} action_mask", (rows, *shape), torch.bool)
    if feed["env"] is not None:
        state = check.mapping(feed["env"], f"{where} state of the environment")
        if isinstance(trainer.env, TorchVectorEnv) and not state.get("state"):
            raise ValueError(f"{where}: the environment's state is empty, though its episodes have begun")
    _check_observations(trainer.collector.adapter.observation_space, feed["obs"], rows, f"{where} obs")
    memory = check.mapping(saved["memory"], f"{where} memory", "num_rows", "known", "fresh", "leaves")
    check.integer(memory["num_rows"], f"{where} memory num_rows", rows, rows)
    for name in ("known", "fresh"):
        check.tensor(memory[name], f"{where} memory {name}", (rows,), torch.bool)
    shapes = leaves(trainer.policy.core.row_shapes())
    for saved_leaf, row in zip(check.sequence(memory["leaves"], f"{where} memory", len(shapes)), shapes):
        check.tensor(saved_leaf, f"{where} memory", (rows, *row.shape))


def _check_observations(space: spaces.Space[Any], saved: Any, rows: int, where: str) -> None:
    """One row per environment, each of the space's shape; indices within their range."""
    if isinstance(space, spaces.Dict):
        check.mapping(saved, where, *space.spaces)
        for name, part in space.items():
            _check_observations(part, saved[name], rows, f"{where} {name}")
    elif isinstance(space, spaces.Tuple):
        for number, (part, value) in enumerate(zip(space, check.sequence(saved, where, len(space)))):
            _check_observations(part, value, rows, f"{where} {number}")
    elif space.shape is not None:
        check.tensor(saved, where, (rows, *space.shape))
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            low = torch.as_tensor(space.start)
            count = torch.as_tensor(space.n if isinstance(space, spaces.Discrete) else space.nvec)
            if saved.is_floating_point() or saved.is_complex() or ((saved < low) | (saved >= low + count)).any():
                raise ValueError(f"{where} holds values that are not in {space}")


def _check_reward_scale(saved: Any, rows: int) -> None:
    if saved is None:
        return
    check.mapping(saved, "reward_scale", "open_return", "count", "mean", "var")
    check.tensor(saved["open_return"], "reward_scale open_return", (rows,), torch.float64)
    check.number(saved["count"], "reward_scale count", 0, 1e300)
    check.number(saved["mean"], "reward_scale mean", -1e300, 1e300)
    check.number(saved["var"], "reward_scale var", 0, 1e300)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
