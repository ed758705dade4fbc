"""Recorded runs, and the ruler that says whether two of them are the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.doctor.observations import map_tensors, stack, tensors_in
from holdfast.doctor.subject import Step


@dataclass
class Trace:
    """A recorded run. `output` `[n, B, K]` and `log_prob` `[n, B]` are float64 on the CPU; `first` is its "
    "first step."""

    output: Tensor
    log_prob: Tensor | None
    actions: Any
    first: int = 0
    marks: list[Any] = field(default_factory=list)
    mark_copies: list[Any] = field(default_factory=list)
    norms: Tensor | None = None

    def cut(self, first: int, last: int) -> Trace:
        """Steps `first..last` of the script, out of this run."""
        here = slice(first - self.first, last - self.first)
        score = None if self.log_prob is None else self.log_prob[here]
        actions = None if self.actions is None else map_tensors(lambda x: x[here], self.actions)
        return Trace(self.output[here], score, actions, first)


class Ruler:
    """Says whether two outputs are the same, column by column: rounding is forgiven, memory effects are not."""

    def __init__(self, reference: Trace, tolerance: float) -> None:
        self.output = self._allow(reference.output.flatten(0, 1), tolerance)
        self.log_prob = (
            None if reference.log_prob is None else self._allow(reference.log_prob.reshape(-1, 1), tolerance)
        )

    @staticmethod
    def _allow(values: Tensor, tolerance: float) -> Tensor:
        size = values.nan_to_num().abs().amax(0)
        spread = values.nan_to_num().std(0)
        allow = tolerance * size.clamp(min=1.0)
        # a head with tiny weights moves little: what counts there is small against its own spread
        rounding = 2 * tolerance / 10 * size.clamp(min=1e-3)
        return torch.minimum(allow, torch.maximum(0.01 * spread, rounding))

    def gap(self, left: Trace, right: Trace) -> Gap:
        """`[n, B]` differences of two traces of the same steps; sampled scores only where the actions agree."""
        width = min(left.output.shape[-1], right.output.shape[-1])
        difference = _difference(left.output[..., :width], right.output[..., :width])
        units = (difference / self.output[:width]).amax(-1)
        raw = difference.amax(-1)
        if self.log_prob is not None and left.log_prob is not None and right.log_prob is not None:
            scores = _difference(left.log_prob, right.log_prob)
            agree = _same_actions(left.actions, right.actions, scores)
            scores = torch.where(agree, scores, torch.zeros_like(scores))
            units = torch.maximum(units, scores / self.log_prob)
            raw = torch.maximum(raw, scores)
        return Gap(units, raw)


@dataclass(frozen=True)
class Gap:
    """Where two traces differ. `units`: in tolerances, `raw`: as is; both `[n, B]`."""

    units: Tensor
    raw: Tensor

    @property
    def differs(self) -> Tensor:
        return self.units > 1.0

    @property
    def any(self) -> bool:
        return bool(self.differs.any())

    @property
    def largest(self) -> float:
        return float(self.raw[self.differs].max()) if self.any else float(self.raw.max())

    def first_place(self) -> tuple[int, int]:
        """(step, environment) of the first difference."""
        step, row = self.differs.nonzero()[0].tolist()
        return step, row


def fill(trace: Trace, steps: list[Step]) -> Trace:
    trace.output = torch.stack([to_numbers(step.output) for step in steps])
    if all(step.log_prob is not None for step in steps):
        trace.log_prob = torch.stack([to_numbers(step.log_prob) for step in steps])
    if all(step.action is not None for step in steps):
        trace.actions = stack([map_tensors(torch.detach, step.action) for step in steps])
    return trace


def to_numbers(x: Any) -> Tensor:
    return torch.as_tensor(x).detach().to(device="cpu", dtype=torch.float64)


def _difference(left: Tensor, right: Tensor) -> Tensor:
    """Absolute difference; NaN equals NaN and differs from every number without bound."""
    difference = (left - right).abs()
    both = left.isnan() & right.isnan()
    one = left.isnan() ^ right.isnan()
    difference = torch.where(one, torch.full_like(difference, float("inf")), difference)
    equal = both | (left == right)
    return torch.where(equal, torch.zeros_like(difference), difference)


def _same_actions(left: Any, right: Any, like: Tensor) -> Tensor:
    agree = torch.ones_like(like, dtype=torch.bool)
    for mine, other in zip(tensors_in(left), tensors_in(right)):
        same = (mine == other).cpu()
        agree &= same.flatten(2).all(-1) if same.dim() > 2 else same
    return agree
