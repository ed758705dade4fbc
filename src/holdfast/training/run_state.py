"""A run's state as checkpoint data, and back: everything that a resumed run needs to continue exactly.

A distributed run's checkpoint is one file with a part per rank: its environments, their memory, its random generators.
Resumed with as many ranks, each takes its part; with another number the environments are redistributed, each with its
memory. `checkpoint.py` writes the file; this module knows what is in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holdfast import __version__
from holdfast.config import named
from holdfast.runs import rng_state, space_data
from holdfast.state import tree_map
from holdfast.training.checkpoint_check import check_fit

if TYPE_CHECKING:
    from holdfast.training.trainer import Trainer

COUNTERS = ("update", "steps", "best_return", "last_eval", "eval_steps")


def payload(trainer: Trainer, files: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a checkpoint holds. Every rank takes part; the result is whole on rank 0 and empty elsewhere. files: what the
    algorithm says about files of its own, on this rank."""
    parts = trainer.ranks.gather({**_part(trainer), "files": files})
    if not parts:
        return {}
    first, *others = parts
    algorithm = trainer.algorithm
    scale = algorithm.reward_scale
    return {
        "holdfast": __version__,
        "config": trainer.config.to_dict(),
        "policy": {k: v.cpu() for k, v in trainer.policy.state_dict().items()},
        "own_policy": trainer.parts.policy_from_config,
        **_spaces(trainer),
        algorithm.name: algorithm.state_dict(),
        "collector": first["collector"],
        "reward_scale": None if scale is None else scale.state_dict(),
        **({} if trainer.reward_model is None else {"reward_model": trainer.reward_model.checkpoint()}),
        "files": first["files"],
        "rng": first["rng"],
        "env_failures": first["env_failures"],
        "other_ranks": others,
        "spoiled_updates": trainer.nonfinite_guard.total,
        "threads": torch.get_num_threads(),
        "seconds": trainer.seconds,
        **{name: getattr(trainer.progress, name) for name in COUNTERS},
        "recent_returns": list(trainer.progress.recent_returns),
        "recent_lengths": list(trainer.progress.recent_lengths),
        "first_returns": None if trainer.progress.first_returns is None else list(trainer.progress.first_returns),
    }


def _spaces(trainer: Trainer) -> dict[str, Any]:
    """What the policy sees and does, as data; None for a space that only a policy of your own understands."""
    policy, adapter = trainer.policy, trainer.collector.adapter
    source = policy if hasattr(policy, "observation_space") and hasattr(policy, "action_space") else adapter
    try:
        return {name: space_data.to_data(getattr(source, name)) for name in ("observation_space", "action_space")}
    except TypeError:
        return {"observation_space": None, "action_space": None}


def _part(trainer: Trainer) -> dict[str, Any]:
    """The part of one rank."""
    trainer.collector.cancel_prefetch()
    scale = trainer.algorithm.reward_scale
    return {
        "collector": trainer.collector.state_dict(),
        "open_return": None if scale is None else scale.open_return.cpu().clone(),
        "generator": trainer.algorithm.generator.get_state(),
        "env_failures": trainer.env_failures.count,
        "rng": rng_state.capture(trainer.device),
    }


def restore(trainer: Trainer, saved: dict[str, Any], folder: Path) -> bool:
    """Restore a trainer from a checkpoint in a folder; False if its environments had to restart their episodes."""
    ranks, config, algorithm = trainer.ranks, trainer.config, trainer.algorithm
    updates = [int(update) for (update,) in ranks.all_gather([float(saved["update"])], trainer.device)]
    if len(set(updates)) > 1:
        raise ValueError(
            f"the ranks found checkpoints of different updates, {updates}; with several machines the run's folder must "
            "be on a disk they share"
        )
    check_fit(trainer, saved)
    trainer.policy.load_state_dict(saved["policy"])
    learned = saved[algorithm.name]
    algorithm.load_state_dict(learned)
    if trainer.reward_model is not None:
        trainer.reward_model.restore(saved.get("reward_model"))
    first = {
        "collector": saved["collector"],
        "open_return": None if saved["reward_scale"] is None else saved["reward_scale"]["open_return"],
        "generator": learned.get("generator"),
        "env_failures": saved.get("env_failures", 0),
        "rng": saved["rng"],
        "files": saved.get("files"),
    }
    parts = [first, *saved.get("other_ranks", [])]
    mine = parts[ranks.rank] if len(parts) == ranks.size else _redistributed(trainer, parts, saved["update"])
    if algorithm.keeps_files:
        _restore_files(trainer, folder, mine.get("files"))
    if mine["generator"] is not None:
        algorithm.generator.set_state(mine["generator"])
    else:
        algorithm.generator.manual_seed(ranks.seed(config.seed, saved["update"]))
    # If episodes must restart, they are other ones than in the first run.
    trainer.collector.seed = ranks.seed(config.seed + saved["update"])
    exact = trainer.collector.load_state_dict(mine["collector"])
    scale = algorithm.reward_scale
    if scale is not None and saved["reward_scale"] is not None:
        scale.load_state_dict({**saved["reward_scale"], "open_return": mine["open_return"]})
        if not exact:
            scale.drop_open_episodes()
    for name in COUNTERS:
        setattr(trainer.progress, name, saved.get(name, 0))  # 0.2 did not write the last two
    trainer.env_failures.count, trainer.nonfinite_guard.total = mine["env_failures"], saved.get("spoiled_updates", 0)
    trainer.progress.earlier_seconds = saved["seconds"]
    trainer.progress.add_episodes(saved["recent_returns"], saved["recent_lengths"])
    first_returns = saved.get("first_returns")  # checkpoints of 0.1 have none
    trainer.progress.first_returns = None if first_returns is None else list(first_returns)
    if mine["rng"] is not None:
        rng_state.restore(mine["rng"], trainer.device)
    else:
        rng_state.seed(ranks.seed(config.seed, saved["update"]))
    return exact


def files_folder(checkpoints: Path, rank: int) -> Path:
    """Where a rank keeps what is too large for the checkpoints in a folder."""
    return checkpoints / f"buffer-rank{rank}"


def _restore_files(trainer: Trainer, folder: Path, manifest: dict[str, Any] | None) -> None:
    config: Any = trainer.config
    if config.refill_buffer:
        config.refill_buffer = False  # this time only
        trainer.notify("the buffer starts empty and is filled again")
        return
    again = named("refill_buffer")
    if manifest is None:
        raise ValueError(
            f"its buffer was not saved with it, or the number of ranks has changed; begin with an empty one ({again})"
        )
    ranks, problem = trainer.ranks, None
    try:
        trainer.algorithm.load_files(files_folder(folder, ranks.rank), manifest)
    except (ValueError, OSError) as error:
        problem = str(error)
    problem = ranks.from_leader(next((text for text in ranks.gather(problem) if text), None))
    if problem:  # of any rank, so that none goes on alone
        raise ValueError(f"{problem} ({again})")


# --- another number of ranks -----------------------------------------------------------------------------------------


def _redistributed(trainer: Trainer, parts: list[dict[str, Any]], update: int) -> dict[str, Any]:
    """This rank's part if the number of ranks changed from `len(parts)`. New ranks have no random generators to restore."""
    ranks, share = trainer.ranks, trainer.parts.env_share
    seed = ranks.seed(trainer.config.seed, update, 1)
    own = parts[ranks.rank] if ranks.rank < len(parts) else {"generator": None, "rng": None}
    opened = [part["open_return"] for part in parts]
    return {
        "collector": regroup_collectors([part["collector"] for part in parts], share, trainer.env, ranks.rank, seed),
        "open_return": None if opened[0] is None else torch.cat(opened)[share.start : share.stop],
        "generator": own["generator"],
        "env_failures": 0 if ranks.rank else sum(part["env_failures"] for part in parts),
        "rng": own["rng"],
    }


def regroup_collectors(parts: list[dict[str, Any]], share: range, env: Any, rank: int, seed: int) -> dict[str, Any]:
    """The collector state of the environments in `share`, numbered through all parts.

    Random numbers of the environment continue from part number `rank`, or from `seed` if there is none. An environment
    that saves its state but has no `regroup` cannot be split: its state is dropped, and its episodes restart.
    """
    if not parts[0]["started"]:
        return parts[0]
    feeds, memories = [part["feed"] for part in parts], [part["memory"] for part in parts]

    def rows(*tensors: Any) -> Any:
        return torch.cat(tensors)[share.start : share.stop].clone()

    states = [feed["env"] for feed in feeds]
    can = states[0] is not None and hasattr(env, "regroup")
    masks = [feed["action_mask"] for feed in feeds]
    return {
        "started": True,
        "feed": {
            "env": env.regroup(states, share.start, rank, seed) if can else None,
            "speaks_torch": feeds[0]["speaks_torch"],
            "obs": tree_map(rows, *(feed["obs"] for feed in feeds)),
            "resets": rows(*(feed["resets"] for feed in feeds)),
            "valid": rows(*(feed["valid"] for feed in feeds)),
            "action_mask": None if any(mask is None for mask in masks) else rows(*masks),
        },
        "memory": {
            "num_rows": len(share),
            "known": rows(*(memory["known"] for memory in memories)),
            "fresh": rows(*(memory["fresh"] for memory in memories)),
            "leaves": [rows(*leaves) for leaves in zip(*(memory["leaves"] for memory in memories))],
        },
        "open_return": rows(*(part["open_return"] for part in parts)),
        "open_length": rows(*(part["open_length"] for part in parts)),
    }
