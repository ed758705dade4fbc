"""The replay check: before the first optimizer step, the training leg must give what the rollout gave.

Law 1 of the library. A gap means that something differs between acting and training: resets shifted, a wrong start
state, dropout, a normalizer that moved. The check measures the gap. If it is too large, it says where and why, by trying
which other resets or start states make the gap vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.algorithms.base import Algorithm, replay_difference
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.segment import Segment
from holdfast.state import leaves, tree_map


class ReplayError(RuntimeError):
    """Training would not replay what the rollout did."""


class ReplayGap(NamedTuple):
    """The largest difference of log-probabilities, or of values against their scale; at step t, environment b."""

    size: float
    t: int
    b: int


Difference = Callable[[Segment], Tensor]
"""How far what a segment recorded is from what training recomputes, [T, B]."""


def tolerance(device: torch.device, half_precision: bool) -> float:
    """What law 1 allows on log-probabilities."""
    if half_precision:
        return 1e-2
    return 1e-3 if device.type == "cuda" else 1e-5


def measure(
    policy: RecurrentPolicy, segment: Segment, autocast: torch.dtype | None = None, bptt: int | None = None
) -> ReplayGap:
    """Recompute what a segment recorded with the current weights."""
    return _largest(replay_difference(policy, segment, bptt, autocast))


def check(algorithm: Algorithm, segment: Segment) -> float:
    """The gap; above ten times the tolerance a `ReplayError` that explains it."""
    half_precision = algorithm.config.precision != "fp32"
    return check_policy(algorithm.policy, segment, algorithm.replay_difference, half_precision)


def check_policy(
    policy: RecurrentPolicy, segment: Segment, difference: Difference | None = None, half_precision: bool = False
) -> float:
    """As `check`, by any measure of the difference; by default that of the policy on the whole segment."""
    difference = difference or partial(replay_difference, policy)
    allowed = tolerance(segment.resets.device, half_precision)
    gap = _largest(difference(segment))
    if gap.size <= 10 * allowed:  # NaN fails this too
        return gap.size
    where = f"at step t={gap.t}, environment {gap.b}, with unchanged weights"
    if gap.size != gap.size:
        raise ReplayError(
            f"log-probabilities or values are NaN {where}. Look at observations, rewards and weights; "
            "hf.debug(True) stops at the first step and environment where it happens."
        )
    raise ReplayError(
        f"training does not replay the rollout: log-probabilities or values differ by {gap.size:.3g} "
        f"(allowed {allowed:.0e}) {where}.\n{_boundary(segment, gap)}\n{_cause(policy, difference, segment, 10 * allowed)}"
    )


def _largest(difference: Tensor) -> ReplayGap:
    flat = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
    t, b = divmod(flat, difference.shape[1])
    return ReplayGap(float(difference[t, b]), t, b)


def _boundary(segment: Segment, gap: ReplayGap) -> str:
    starts = segment.resets[:, gap.b].nonzero().squeeze(1).tolist()
    if not starts:
        return "No episode begins in that environment's sequence, so the start state is the first suspect."
    nearest = min(starts, key=lambda t: abs(t - gap.t))
    side = "before" if nearest < gap.t else "after"
    distance = abs(gap.t - nearest)
    when = "at that step" if not distance else f"{distance} step{'s' * (distance != 1)} {side} it"
    return f"The nearest episode start is at t={nearest}, {when}."


# --- why ---------------------------------------------------------------------------------------------------------


def _cause(policy: RecurrentPolicy, difference: Difference, segment: Segment, limit: float) -> str:
    layers = _refused_layers(policy)
    if layers:
        return layers
    present = difference(segment)
    if float((present - difference(segment)).abs().max()) > limit / 10:
        return "Cause: two evaluations of the same segment differ, so something in encode or decode is random."
    if float(difference(_from_zeros(segment)).max()) <= limit:
        return (
            "Cause: the gap vanishes from a zero start state: the rollout began from zeros, the stored state says "
            "otherwise."
        )
    for words, resets in _other_resets(segment):
        if _explains(difference, segment, resets, limit):
            return f"Cause: the gap vanishes when the stored resets are {words}: that is how the rollout really reset."
    if _only_before_first_reset(segment, present, limit):
        zeros = all(not leaf.any() for leaf in leaves(segment.start_state))
        return (
            "Cause: only steps between a sequence's start and its first episode start differ: the stored start state "
            f"is not the one the rollout had{' (it is all zeros)' if zeros else ''}."
        )
    return (
        "No usual cause found. Look for anything that differs between act and evaluate: a normalizer that moved, "
        "noise, weights changed after the rollout, precision in one leg only. `holdfast doctor` examines the policy."
    )


def rollout_failed(policy: nn.Module, error: ValueError) -> None:
    """Name the layers that the check refuses if they are behind an error in the rollout: BatchNorm fails on one row."""
    layers = _refused_layers(policy)
    if layers:
        raise ReplayError(f"the rollout failed: {error}.\n{layers}") from error


def _refused_layers(policy: nn.Module) -> str | None:
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    found = [
        f"{type(m).__name__} ({name})"
        for name, m in policy.named_modules()
        if isinstance(m, kinds) and m.training and getattr(m, "p", 1.0) > 0
    ]
    if not found:
        return None
    return (
        f"Cause: {', '.join(found)} in training mode. Dropout and batch statistics differ between the two legs; "
        "remove them from the policy, or set them to eval()."
    )


def _other_resets(segment: Segment) -> list[tuple[str, Tensor]]:
    """Resets that the rollout may have used in place of the stored ones; entry 0 is unknown."""
    resets = segment.resets
    none = torch.zeros_like(resets)
    earlier, later, ends = none.clone(), none.clone(), none.clone()
    earlier[:-1], later[1:] = resets[1:], resets[:-1]
    ended = ~segment.valid if not segment.valid.all() else segment.terminated | segment.truncated
    ends[1:] = ended[:-1]
    found = [
        ("one step earlier (they are late by one)", earlier),
        ("one step later (they are early by one)", later),
        ("completed: where an episode ended, the next step begins another (some are missing)", ends),
        ("left out (the rollout never reset)", none),
    ]
    return [(words, other) for words, other in found if not torch.equal(other[1:], resets[1:])]


def _explains(difference: Difference, segment: Segment, resets: Tensor, limit: float) -> bool:
    """Whether these resets explain the rollout. The reset of step 0 is unknown, so each environment may have either; so is
    that of the last step, which is left out."""
    begins, goes_on = resets.clone(), resets.clone()
    begins[0], goes_on[0] = True, False
    worst = [difference(segment.changed(resets=r))[:-1].amax(0) for r in (begins, goes_on)] if len(resets) > 1 else []
    return bool(worst) and bool((torch.minimum(*worst) <= limit).all())


def _from_zeros(segment: Segment) -> Segment:
    start, chunks = (tree_map(torch.zeros_like, s) for s in (segment.start_state, segment.chunk_states))
    return segment.changed(start_state=start, chunk_states=chunks)


def _only_before_first_reset(segment: Segment, present: Tensor, limit: float) -> bool:
    length = segment.num_steps // max(1, len(segment.chunk_states))
    begun = segment.resets.unflatten(0, (-1, length)).cumsum(1).flatten(0, 1) > 0  # [T, B]
    return bool((present[begun] <= limit).all()) and bool(begun.any())
