"""Non-finite losses and gradients: count them, keep the evidence, and clear memory rows that hold NaN.

The engine has already skipped those optimizer steps, so the weights are finite. A memory row that holds NaN would give NaN
until its episode ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from holdfast.config import RunConfig
from holdfast.memory import Memory
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.segment import Segment
from holdfast.runs import checkpoint
from holdfast.state import flat_rows, leaves

FOLDER = "nonfinite"
KEPT = 2  # files of a rank: the first, and the latest


class NonFiniteError(RuntimeError):
    """Training stopped: too many updates in a row were skipped."""


class NonFiniteGuard:
    """Watches every update of a run. `total`: updates with skipped steps. `in_a_row`: the latest ones without any step."""

    def __init__(self, config: RunConfig, rank: int, notify: Callable[[str], None]) -> None:
        self.config, self.rank, self.notify = config, rank, notify
        self.total = self.in_a_row = 0

    def after_update(self, row: dict[str, float], segment: Segment, policy: RecurrentPolicy, memory: Memory) -> None:
        """Count and report skipped steps, keep their evidence, and stop after too many updates without a step."""
        if row.get("memory/nan", 0) > 0:
            clear_memory(memory)
        skipped = row.get("train/skipped_steps", 0.0)
        if skipped == 0:
            self.in_a_row = 0
            return
        self.total += 1
        nothing_learned = math.isnan(row.get("train/grad_norm", 0.0))  # a mean over the steps that were taken
        self.in_a_row = self.in_a_row + 1 if nothing_learned else 0
        evidence: Path | str
        try:
            evidence = keep_evidence(self.config.folder, self.rank, row, segment, policy.state_dict())
        except OSError as error:
            evidence = f"nowhere ({error})"
        origin = where_from(segment)
        # Isolated skips are reported at counts 1, 2, 4, 8, ...; consecutive ones always.
        if self.total & (self.total - 1) == 0 or self.in_a_row > 1:
            what = "the update was" if nothing_learned else f"{skipped:.0f} of its steps were"
            so_far = f" (update number {self.total} of this kind)" if self.total > 1 else ""
            self.notify(
                f"loss or gradients were not finite, {what} skipped{so_far}: {origin}; rollout and weights are in {evidence}"
            )
        # A short run that has skipped every update has learned nothing, and says why.
        if self.in_a_row >= min(self.config.max_bad_updates, self.config.num_updates):
            good = checkpoint.rolling(self.config.folder)
            last = f"The last good checkpoint is {good[-1]}" if good else "No checkpoint was written yet"
            raise NonFiniteError(
                f"loss or gradients were not finite in {self.in_a_row} updates in a row, and training stopped: {origin}. "
                f"{last}. Rollout and weights of the last update are in {evidence}"
            )


def where_from(segment: Segment) -> str:
    """Which input of the policy is not finite: observations or rewards [T, B, ...], or the memory it started from."""
    given = {"observations": leaves(segment.obs), "rewards": [segment.rewards]}
    for name, parts in given.items():
        bad = torch.stack([~part.isfinite().flatten(2).all(2) for part in map(_flat, parts)]).any(0)  # [T, B]
        if bad.any():
            step, env = bad.nonzero()[0].tolist()
            how_many = int(bad.any(0).sum())
            others = f", {how_many} environments in total" if how_many > 1 else ""
            return f"{name} of environment {env} were NaN or infinite in step {step} of the rollout{others}"
    memory = [leaf for leaf in leaves(segment.start_state) if leaf.is_floating_point()]
    if not all(bool(leaf.isfinite().all()) for leaf in memory):
        return "the memory held NaN or Inf when the rollout began"
    return "observations, rewards and memory were finite, so the cause is the network, the loss or another rank"


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x[..., None] if x.dim() == 2 else x


def inputs_are_finite(segment: Segment) -> bool:
    """Whether observations, rewards and the start state are finite."""
    given = [*leaves(segment.obs), segment.rewards, *leaves(segment.start_state)]
    return all(bool(leaf.isfinite().all()) for leaf in given if leaf.is_floating_point())


@torch.no_grad()
def clear_memory(memory: Memory) -> list[int]:
    """Reset the rows that hold NaN or Inf; returns their ids."""
    state = leaves(memory.read())
    if not state:
        return []
    bad = torch.stack([~flat_rows(leaf).isfinite().all(1) for leaf in state]).any(0).nonzero().squeeze(1)
    memory.reset(bad)
    return bad.tolist()


def keep_evidence(folder: Path, rank: int, row: dict[str, float], segment: Segment, policy: dict[str, Any]) -> Path:
    """Write the rollout and the weights of a skipped update; of earlier ones only the first is kept."""
    path = folder / FOLDER / f"update_{int(row['update']):08d}-rank{rank}.pt"
    parts = {f.name: getattr(segment, f.name) for f in fields(segment) if f.name not in ("seconds", "targets")}
    content = {
        "segment": _on_host(parts),
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
