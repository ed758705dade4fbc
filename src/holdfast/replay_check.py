"""The replay check: before the first optimiser step, the training leg must give what the rollout gave.

Law 1 of the library. A gap means that something differs between acting and training: resets shifted, a wrong start
state, dropout, a normaliser that moved. The check measures the gap and, when it is too large, says where and why.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.collect import Segment
from holdfast.policy import RecurrentPolicy
from holdfast.state import tree_map


class ReplayError(RuntimeError):
    """Training would not replay what the rollout did."""


class Gap(NamedTuple):
    """The largest difference of log-probabilities, and where: step t, column b."""

    size: float
    t: int
    b: int


def tolerance(device: torch.device, half_precision: bool) -> float:
    """What law 1 allows on log-probabilities."""
    if half_precision:
        return 1e-2
    return 1e-3 if device.type == "cuda" else 1e-5


def measure(policy: RecurrentPolicy, segment: Segment, autocast: torch.dtype | None = None) -> Gap:
    """Recompute the stored log-probabilities with the present weights. `segment` as it will be trained on."""
    return _largest(_difference(policy, segment, segment.resets, autocast))


def check(
    policy: RecurrentPolicy, segment: Segment, autocast: torch.dtype | None = None, allowed: float | None = None
) -> float:
    """The gap; above ten times the tolerance a `ReplayError` that explains it."""
    allowed = tolerance(segment.resets.device, autocast is not None) if allowed is None else allowed
    gap = measure(policy, segment, autocast)
    if gap.size <= 10 * allowed:  # NaN fails this too
        return gap.size
    raise ReplayError(explain(policy, segment, gap, allowed, autocast))


@torch.no_grad()
def _difference(policy: RecurrentPolicy, segment: Segment, resets: Tensor, autocast: torch.dtype | None) -> Tensor:
    with torch.autocast(resets.device.type, autocast, enabled=autocast is not None):
        new = policy.evaluate(
            segment.obs, segment.actions, segment.start_state, resets, action_mask=segment.action_mask
        )
    difference = (new.log_prob.float() - segment.log_prob).abs()
    return torch.where(segment.valid, difference, 0.0)  # [T, C]


def _largest(difference: Tensor) -> Gap:
    flat = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
    t, b = divmod(flat, difference.shape[1])
    return Gap(float(difference[t, b]), t, b)


def explain(
    policy: RecurrentPolicy, segment: Segment, gap: Gap, allowed: float, autocast: torch.dtype | None = None
) -> str:
    """What differs, where, which boundary is near, and the likeliest cause."""
    lines = [
        f"training does not replay the rollout: log-probabilities differ by {gap.size:.3g} (allowed {allowed:.0e}) "
        f"at step t={gap.t}, environment {gap.b % segment.num_envs}, with unchanged weights.",
        _boundary(segment, gap),
    ]
    random = _random_layers(policy)
    if random:
        lines.append(
            f"Cause: {', '.join(random)} in training mode. Dropout and batch statistics differ between the two legs; "
            "remove them from the policy, or set them to eval()."
        )
        return "\n".join(lines)
    again = _largest((_difference(policy, segment, segment.resets, autocast) - _difference(policy, segment, segment.resets, autocast)).abs())
    if again.size > allowed:
        lines.append("Cause: two evaluations of the same segment differ, so something in encode or decode is random.")
        return "\n".join(lines)
    for words, resets in _other_resets(segment.resets):
        if _largest(_difference(policy, segment, resets, autocast)).size <= 10 * allowed:
            lines.append(f"Cause: the gap vanishes when the stored resets are {words}: that is how the rollout really reset.")
            return "\n".join(lines)
    fresh = tree_map(torch.zeros_like, segment.start_state)
    zeros = Segment(**{**segment.__dict__, "start_state": fresh})
    if _largest(_difference(policy, zeros, segment.resets, autocast)).size <= 10 * allowed:
        lines.append("Cause: the gap vanishes from a zero start state: the rollout began from zeros, the stored state says otherwise.")
    else:
        lines.append(
            "No usual cause found. Look for anything that differs between act and evaluate: a normaliser that moved, noise, "
            "weights changed after the rollout, precision in one leg only. `holdfast doctor` examines the policy."
        )
    return "\n".join(lines)


def _boundary(segment: Segment, gap: Gap) -> str:
    starts = segment.resets[:, gap.b].nonzero().squeeze(1).tolist()
    if not starts:
        return "No episode begins in that sequence, so the start state is the first suspect."
    nearest = min(starts, key=lambda t: abs(t - gap.t))
    when = "at that very step" if nearest == gap.t else f"{abs(gap.t - nearest)} steps {'before' if nearest < gap.t else 'after'} it"
    return f"The nearest episode start is at t={nearest}, {when}."


def _random_layers(policy: nn.Module) -> list[str]:
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    return [
        f"{type(m).__name__} ({name})"
        for name, m in policy.named_modules()
        if isinstance(m, kinds) and m.training and getattr(m, "p", 1.0) > 0
    ]


def _other_resets(resets: Tensor) -> list[tuple[str, Tensor]]:
    none = torch.zeros_like(resets)
    earlier, later = none.clone(), none.clone()
    earlier[:-1], later[1:] = resets[1:], resets[:-1]
    first = none.clone()
    first[0] = resets[0]
    return [
        ("one step earlier (they are late by one)", earlier),
        ("one step later (they are early by one)", later),
        ("one step earlier and at the segment's start", earlier | first),
        ("left out", none),
    ]
