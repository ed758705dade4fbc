"""When loss or gradients are not finite: count it, keep what is needed to find out why, clear what would stay spoiled.

The optimiser has already skipped those steps (`ppo.py`), so weights are sound. What a NaN can still spoil is memory: a
row that holds one gives NaN until its episode ends.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from holdfast import checkpoint
from holdfast.collect import Segment
from holdfast.memory import Memory
from holdfast.state import leaves

FOLDER = "nonfinite"
KEPT = 2  # files of a rank: the first, and the latest


class NonFiniteError(RuntimeError):
    """Training stopped: updates in a row came to nothing."""


def no_step_taken(row: dict[str, float], minibatches: int) -> bool:
    """Whether every optimiser step of an update was skipped."""
    return row["train/skipped_steps"] >= row["train/epochs"] * minibatches


def inputs_are_finite(segment: Segment) -> bool:
    """Whether what the policy was given is finite: observations, rewards, the state it started from."""
    given = [*leaves(segment.obs), segment.rewards, *leaves(segment.start_state)]
    return all(bool(leaf.isfinite().all()) for leaf in given if leaf.is_floating_point())


@torch.no_grad()
def clear_memory(memory: Memory) -> list[int]:
    """Make the rows fresh that hold NaN or Inf; which."""
    state = leaves(memory.read())
    if not state:
        return []
    bad = torch.stack([~leaf.isfinite().flatten(1).all(1) for leaf in state]).any(0).nonzero().squeeze(1)
    memory.reset(bad)
    return bad.tolist()


def keep_evidence(folder: Path, rank: int, row: dict[str, float], segment: Segment, policy: dict[str, Any]) -> Path:
    """Write the rollout and the weights of an update that went wrong; of earlier ones only the first is kept."""
    path = folder / FOLDER / f"update_{int(row['update']):08d}-rank{rank}.pt"
    timed = {f.name: getattr(segment, f.name) for f in fields(segment)}
    content = {
        "segment": _on_host({**timed, "seconds": {}}),
        "policy": _on_host(policy),
        "row": {name: float(number) for name, number in row.items()},
    }
    checkpoint.save(path, content)
    for old in sorted(path.parent.glob(f"update_*-rank{rank}.pt"))[1 : 1 - KEPT]:
        old.unlink(missing_ok=True)
    return path


def _on_host(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): _on_host(part) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_on_host(part) for part in tree]
    return tree.detach().cpu() if isinstance(tree, torch.Tensor) else tree
