"""The scripted environments: random observations, and episode ends placed where policies go wrong.

Actions have no effect. Every leg sees the same observations and flags, so any difference comes from the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.doctor.subjects.base import Subject
from holdfast.state import map_tensors, tensors_in, tree_map

STEPS = 12  # of a segment
SEGMENTS = 3
TOTAL = STEPS * SEGMENTS

# Per row: the first steps of new episodes, and how the episode before ended (t terminated, c truncated, b both).
# Rows differ so that every wrong rule gives its own pattern: row 0 never ends; the others end in the middle of a
# segment, on its first and last step, and twice in a row.
_ENDS = {
    0: "",
    1: "5t 12t 30c",
    2: "17c 24c",
    3: "14t 17c 18t 23t 28b",
    4: "11c 20t 33t",
}
_ROWS_OF_FEW = {1: [3], 2: [0, 3], 3: [0, 3, 2], 4: [0, 1, 2, 3]}


@dataclass(frozen=True)
class Script:
    """`obs` and `other_obs` `[N, B, ...]`; `terminated`, `truncated` `[N, B]`, each flag at the observation it came with."""

    obs: Any
    terminated: Tensor
    truncated: Tensor
    other_obs: Any
    action_masks: Tensor | None

    @property
    def resets(self) -> Tensor:
        """`[N, B]` first observations of episodes, step 0 included."""
        resets = self.terminated | self.truncated
        resets[0] = True
        return resets

    @property
    def rows(self) -> int:
        return self.terminated.shape[1]

    def perturbed(self, step: int, row: int | None = None) -> Any:
        """The observations, with one step of one environment (or of all) replaced by other ones."""

        def swap(mine: Tensor, other: Tensor) -> Tensor:
            changed = mine.clone()
            where = (step,) if row is None else (step, row)
            changed[where] = other[where]
            return changed

        return tree_map(swap, self.obs, self.other_obs)


def write_script(subject: Subject, seed: int) -> Script:
    """The script for this subject. Another seed gives other observations and a few other episode ends."""
    generator = torch.Generator().manual_seed(seed)
    rows = subject.num_envs
    terminated = torch.zeros(TOTAL, rows, dtype=torch.bool)
    truncated = torch.zeros(TOTAL, rows, dtype=torch.bool)
    for row, kind in enumerate(_ROWS_OF_FEW.get(rows, list(_ENDS))):
        for end in _ENDS[kind].split():
            step, how = int(end[:-1]), end[-1]
            terminated[step, row] = how in "tb"
            truncated[step, row] = how in "cb"
    # A few more at random, but none in row 0 and none in the first two steps.
    chance = torch.rand(TOTAL, rows, generator=generator)
    chance[:2], chance[:, 0] = 1.0, 1.0
    terminated |= chance < 0.02
    truncated |= (chance >= 0.02) & (chance < 0.04)
    for row in range(len(_ENDS), rows):
        terminated[:, row] |= chance[:, row] < 0.06
        truncated[:, row] |= (chance[:, row] >= 0.06) & (chance[:, row] < 0.12)

    if subject.whole_episodes:  # training replays the first `STEPS` steps, as one episode
        terminated[:STEPS], truncated[:STEPS] = False, False

    def grid(x: Tensor) -> Tensor:
        return x.reshape(TOTAL, rows, *x.shape[1:])

    obs = map_tensors(grid, subject.observations(TOTAL * rows, generator))
    other = map_tensors(grid, subject.observations(TOTAL * rows, generator))
    masks = subject.action_masks(TOTAL * rows, generator)
    device = tensors_in(obs)[0].device
    return Script(
        obs=obs,
        terminated=terminated.to(device),
        truncated=truncated.to(device),
        other_obs=tree_map(_really_other, obs, other),
        action_masks=None if masks is None else grid(masks.to(device)),
    )


def _really_other(mine: Tensor, other: Tensor) -> Tensor:
    """`other`, but where it happens to equal `mine` (observations with few values) something else."""
    if mine.is_floating_point():
        return other
    same = (mine == other).flatten(2).all(-1) if mine.dim() > 2 else mine == other
    spare = mine.flatten(0, 1).roll(1, 0).reshape(mine.shape)
    return torch.where(same.reshape(*same.shape, *[1] * (mine.dim() - 2)), spare, other)
