"""Wrong ways to reset, as patterns. A leg that equals `Recordings.alone(pattern)` follows that rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.doctor.recordings import last_reset
from holdfast.doctor.script import Script


@dataclass(frozen=True)
class Hypothesis:
    """One mistake, or two at once (`causes`). `resets` `[N, B]`: the resets it would follow, as `Recordings.alone` takes them."""

    causes: tuple[str, ...]
    story: str
    resets: Tensor


def of_a_rollout(script: Script) -> list[Hypothesis]:
    """Mistakes that a rollout leg can make over the whole script, the most likely first."""
    true = script.resets
    rules = _rules(script.terminated, script.truncated, true)
    nothing = torch.zeros_like(true)
    everything = torch.ones_like(true)
    rules.insert(0, Hypothesis(("never-resets",), "no episode end clears anything", nothing))
    rules.append(Hypothesis(("memoryless",), "every step starts from an empty memory", everything))
    return _with_first_step(rules)


def of_training(script: Script, before: Tensor, first: int, last: int) -> list[Hypothesis]:
    """Mistakes that a training leg can make on the steps `first..last`; `before`: the rollout's resets until then."""
    true = script.resets
    inside = torch.zeros_like(true)
    inside[first:last] = True
    rules = [
        Hypothesis((h.causes[0],), h.story, torch.where(inside, h.resets, before))
        for h in _rules(script.terminated, script.truncated, true)
    ]

    def variant(causes: tuple[str, ...], story: str, resets: Tensor, at_start: Tensor | bool) -> None:
        pattern = torch.where(inside, resets, before)
        pattern[first] = at_start
        rules.append(Hypothesis(causes, story, pattern))

    none, every = torch.zeros_like(true), torch.ones_like(true)
    dropped, zeros = "reset-dropped-in-training", "starts-from-zeros"
    at_first = true[first]
    variant((zeros,), "each segment starts from an empty memory", true, True)
    variant((dropped,), "ends inside a segment clear nothing", none, at_first)
    variant((dropped,), "no episode end clears anything", none, False)
    variant((zeros, dropped), "each segment starts empty and is run as one episode", none, True)
    variant(("boundary-lost-at-segment-start",), "the end on the segment's first step clears nothing", true, False)
    late = _late(true)
    for at_start in (torch.zeros_like(at_first), at_first, at_first | late[first]):
        variant(("late-by-one",), "each end inside a segment clears the state one step late", late, at_start)
    early = _early(true)
    early[last - 1] = False
    variant(("early-by-one",), "each end inside a segment clears the state one step early", early, early[first])
    variant(("early-by-one",), "each end inside a segment clears the state one step early", early, at_first)
    variant(("memoryless",), "every step starts from an empty memory", every, True)
    rules = _with_first_step(rules)
    rules.append(
        Hypothesis(
            (dropped,), "each episode starts with the memory of the one before", _one_before(true, before, first)
        )
    )
    return rules


def _one_before(true: Tensor, before: Tensor, first: int) -> Tensor:
    """`[N, B]` since which step each step remembers, if a buffer is cut at episode starts and no stored state is reset."""
    since, earlier = last_reset(true), last_reset(before)
    start = since.clamp(min=1)
    previous = torch.where(start - 1 < first, earlier, since).gather(0, start - 1)
    return torch.where(since >= max(first, 1), previous, torch.where(since < first, earlier[max(first - 1, 0)], since))


def _rules(terminated: Tensor, truncated: Tensor, true: Tensor) -> list[Hypothesis]:
    ends = terminated | truncated
    anyone = ends.any(1, keepdim=True)
    by_value = torch.zeros_like(true)  # state[flags] with 0/1 flags: row 0 if any flag is 0, row 1 if any is 1
    by_value[:, 0] = (~ends).any(1)
    if true.shape[1] > 1:
        by_value[:, 1] = ends.any(1)
    return [
        Hypothesis(("truncation-ignored",), "truncations clear nothing", terminated.clone()),
        Hypothesis(("termination-ignored",), "terminations clear nothing", truncated.clone()),
        Hypothesis(("late-by-one",), "each end clears the state one step late", _late(true)),
        Hypothesis(("early-by-one",), "each end clears the state one step early", _early(true)),
        Hypothesis(("index-not-mask",), "rows 0 and 1 are cleared by the value of the flags", by_value),
        Hypothesis(("index-not-mask",), "rows 0 and 1 are cleared whenever some episode ends", by_value & anyone),
        Hypothesis(("resets-everybody",), "one end clears every environment", anyone.expand_as(true).clone()),
    ]


def _late(resets: Tensor) -> Tensor:
    """Each reset one step later. The start of the run is always fresh and does not shift."""
    shifted = torch.zeros_like(resets)
    shifted[2:] = resets[1:-1]
    return shifted


def _early(resets: Tensor) -> Tensor:
    shifted = torch.zeros_like(resets)
    shifted[:-1] = resets[1:]
    return shifted


def _with_first_step(rules: list[Hypothesis]) -> list[Hypothesis]:
    for rule in rules:
        rule.resets[0] = True
    return rules
