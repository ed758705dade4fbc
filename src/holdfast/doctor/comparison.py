"""Recorded runs, and whether two of them are the same: rounding is forgiven, an effect of memory is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.doctor.subjects.base import Replay, SubjectStep
from holdfast.state import map_tensors, tensors_in, tree_map


@dataclass
class Recording:
    """A recorded run. `output` `[n, B, K]` and `log_prob` `[n, B]` are float64 on the CPU.

    `first`: the step of the script that it begins with. `marks[i]`: what `Subject.mark` returned before step i, and
    after the last; `mark_copies[i]`: a copy made at that moment. `norms` `[n, B]`: size of the state after each step.
    """

    output: Tensor
    log_prob: Tensor | None
    actions: Any
    first: int = 0
    marks: list[Any] = field(default_factory=list)
    mark_copies: list[Any] = field(default_factory=list)
    norms: Tensor | None = None

    def cut(self, first: int, last: int) -> Recording:
        """Steps `first..last` of the script."""
        here = slice(first - self.first, last - self.first)
        log_prob = None if self.log_prob is None else self.log_prob[here]
        actions = None if self.actions is None else map_tensors(lambda x: x[here], self.actions)
        return Recording(self.output[here], log_prob, actions, first)


def record(steps: Sequence[SubjectStep], first: int = 0) -> Recording:
    """The steps of a run as one recording. Scores and actions are kept if every step has them."""
    recording = Recording(torch.stack([to_numbers(step.output) for step in steps]), None, None, first)
    if all(step.log_prob is not None for step in steps):
        recording.log_prob = torch.stack([to_numbers(step.log_prob) for step in steps])
    if all(step.action is not None for step in steps):
        recording.actions = tree_map(_stack, *[step.action for step in steps])
    return recording


def record_replay(replay: Replay, actions: Any) -> Recording:
    """What the training leg returned, without its graph."""
    log_prob = None if replay.log_prob is None else to_numbers(replay.log_prob)
    return Recording(to_numbers(replay.output), log_prob, actions)


def to_numbers(x: Any) -> Tensor:
    """Without a graph, float64, on the CPU."""
    return torch.as_tensor(x).detach().to(device="cpu", dtype=torch.float64)


class Tolerances:
    """The largest difference that counts as rounding, column by column: `output` `[K]`, `log_prob` `[1]`."""

    def __init__(self, reference: Recording, tolerance: float) -> None:
        self.output = self._allowed(reference.output.flatten(0, 1), tolerance)
        self.log_prob = (
            None if reference.log_prob is None else self._allowed(reference.log_prob.reshape(-1, 1), tolerance)
        )

    @staticmethod
    def _allowed(values: Tensor, tolerance: float) -> Tensor:
        size = values.nan_to_num().abs().amax(0)
        spread = values.nan_to_num().std(0)
        allowed = tolerance * size.clamp(min=1.0)
        # A head with tiny weights moves little, so its differences are measured against its own spread.
        rounding = 2 * tolerance / 10 * size.clamp(min=1e-3)
        return torch.minimum(allowed, torch.maximum(0.01 * spread, rounding))

    def compare(self, left: Recording, right: Recording) -> Difference:
        """The difference of two recordings of the same steps. Scores count only where the sampled actions agree."""
        width = min(left.output.shape[-1], right.output.shape[-1])
        outputs = _distance(left.output[..., :width], right.output[..., :width])
        in_tolerances = (outputs / self.output[:width]).amax(-1)
        sizes = outputs.amax(-1)
        if self.log_prob is not None and left.log_prob is not None and right.log_prob is not None:
            scores = _distance(left.log_prob, right.log_prob)
            agree = _same_actions(left.actions, right.actions, scores)
            scores = torch.where(agree, scores, torch.zeros_like(scores))
            in_tolerances = torch.maximum(in_tolerances, scores / self.log_prob)
            sizes = torch.maximum(sizes, scores)
        return Difference(in_tolerances > 1.0, sizes)


@dataclass(frozen=True)
class Difference:
    """Where two recordings differ by more than rounding, and by how much; both `[n, B]`."""

    where: Tensor
    sizes: Tensor

    @property
    def any(self) -> bool:
        return bool(self.where.any())

    @property
    def largest(self) -> float:
        return float(self.sizes[self.where].max()) if self.any else float(self.sizes.max())


def _stack(*leaves: Any) -> Any:
    return torch.stack([leaf.detach() for leaf in leaves]) if isinstance(leaves[0], Tensor) else list(leaves)


def _distance(left: Tensor, right: Tensor) -> Tensor:
    """Absolute difference. NaN equals NaN, and its distance from a number is infinite."""
    distance = (left - right).abs()
    one_nan = left.isnan() ^ right.isnan()
    distance = torch.where(one_nan, torch.full_like(distance, float("inf")), distance)
    equal = (left.isnan() & right.isnan()) | (left == right)
    return torch.where(equal, torch.zeros_like(distance), distance)


def _same_actions(left: Any, right: Any, like: Tensor) -> Tensor:
    """`[n, B]` where the sampled actions of two recordings are the same."""
    agree = torch.ones_like(like, dtype=torch.bool)
    for mine, other in zip(tensors_in(left), tensors_in(right)):
        same = (mine == other).cpu()
        agree &= same.flatten(2).all(-1) if same.dim() > 2 else same
    return agree
