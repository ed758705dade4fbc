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
    """Mistakes that a rollout leg can make over the whole script: the most likely first, two at once last."""
    true = script.resets
    never = Hypothesis(("never-resets",), "no episode end clears anything", torch.zeros_like(true))
    memoryless = Hypothesis(("memoryless",), "every step starts from an empty memory", torch.ones_like(true))
    return _with_first_step([never, *_rules(script), memoryless, *_pairs(script)])


def of_training(script: Script, before: Tensor, first: int, last: int, fresh: bool = False) -> list[Hypothesis]:
    """Mistakes that a training leg can make on the steps `first..last`; `before`: the rollout's resets until then.

    `fresh`: each rollout starts with an empty memory, and training does the same.
    """
    true = script.resets
    inside = torch.zeros_like(true)
    inside[first:last] = True
    rules: list[Hypothesis] = []

    def variant(causes: tuple[str, ...], story: str, resets: Tensor, at_start: Tensor | bool) -> None:
        pattern = torch.where(inside, resets, before)
        pattern[first] = True if fresh else at_start
        rules.append(Hypothesis(causes, story, pattern))

    none, every = torch.zeros_like(true), torch.ones_like(true)
    dropped, zeros, lost = "reset-dropped-in-training", "starts-from-zeros", "boundary-lost-at-segment-start"
    at_first = true[first]
    for rule in _rules(script):
        variant(rule.causes, rule.story, rule.resets, rule.resets[first])
    variant((zeros,), "each segment starts from an empty memory", true, True)
    variant((dropped,), "ends inside a segment clear nothing", none, at_first)
    variant((dropped,), "no episode end clears anything", none, False)
    variant((zeros, dropped), "each segment starts empty and is run as one episode", none, True)
    variant((lost,), "the end on the segment's first step clears nothing", true, False)
    late, early = _late(true), _early(true)
    early[last - 1] = False
    for at_start in (torch.zeros_like(at_first), at_first, at_first | late[first]):
        variant(("late-by-one",), "each end inside a segment clears the state one step late", late, at_start)
    for at_start in (early[first], at_first):
        variant(("early-by-one",), "each end inside a segment clears the state one step early", early, at_start)
    variant(("memoryless",), "every step starts from an empty memory", every, True)
    for rule in _pairs(script):
        variant(rule.causes, rule.story, rule.resets, rule.resets[first])
    for rule in _rules(script):
        resets = early if rule.causes == ("early-by-one",) else rule.resets
        variant((zeros, *rule.causes), f"each segment starts from an empty memory, and {rule.story}", resets, True)
        variant((lost, *rule.causes), f"the end on the segment's first step is lost, and {rule.story}", resets, False)
    rules = _with_first_step(rules)
    one_before = _one_before(true, before, first)
    rules.append(Hypothesis((dropped,), "each episode starts with the memory of the previous one", one_before))
    return rules


def of_resets_in_training(script: Script, first: int, last: int) -> list[Hypothesis]:
    """What a training leg may do at episode ends in the segment `first..last`, whatever it starts from. The first is right."""
    true = script.resets
    lost, late, early = true.clone(), _late(true), _early(true)
    lost[first] = late[first] = early[last - 1] = False
    return [
        Hypothesis((), "", true),
        *_rules(script),
        Hypothesis(("boundary-lost-at-segment-start",), "the end on a segment's first step clears nothing", lost),
        Hypothesis(("late-by-one",), "each end inside a segment clears the state one step late", late),
        Hypothesis(("early-by-one",), "each end inside a segment clears the state one step early", early),
        Hypothesis(("reset-dropped-in-training",), "ends clear nothing", torch.zeros_like(true)),
    ]


def _one_before(true: Tensor, before: Tensor, first: int) -> Tensor:
    """`[N, B]` since which step each step remembers, if a buffer is cut at episode starts and no stored state is reset."""
    since, earlier = last_reset(true), last_reset(before)
    start = since.clamp(min=1)
    previous = torch.where(start - 1 < first, earlier, since).gather(0, start - 1)
    return torch.where(since >= max(first, 1), previous, torch.where(since < first, earlier[max(first - 1, 0)], since))


def _rules(script: Script) -> list[Hypothesis]:
    terminated, truncated, true = script.terminated, script.truncated, script.resets
    ends = terminated | truncated
    by_value = _by_value(ends)
    rules = [
        Hypothesis(("truncation-ignored",), "truncations clear nothing", terminated.clone()),
        Hypothesis(("termination-ignored",), "terminations clear nothing", truncated.clone()),
        Hypothesis(("late-by-one",), "each end clears the state one step late", _late(true)),
        Hypothesis(("early-by-one",), "each end clears the state one step early", _early(true)),
        Hypothesis(("index-not-mask",), "rows 0 and 1 are cleared by the value of the flags", by_value),
        Hypothesis(
            ("index-not-mask",), "rows 0 and 1 are cleared whenever some episode ends", by_value & _anyone(ends)
        ),
        Hypothesis(("resets-everybody",), "one end clears every environment", _anyone(ends)),
    ]
    # With one environment, a rule that clears nothing is the one of a policy that never resets.
    return [rule for rule in rules if script.rows > 1 or bool(rule.resets[1:].any())]


def _pairs(script: Script) -> list[Hypothesis]:
    """A kind of end that is ignored, and the other one misread."""
    pairs = []
    for cause, flags, story in (
        ("truncation-ignored", script.terminated, "truncations clear nothing"),
        ("termination-ignored", script.truncated, "terminations clear nothing"),
    ):
        pairs += [
            Hypothesis((cause, "late-by-one"), f"{story}, other ends clear the state one step late", _late(flags)),
            Hypothesis((cause, "early-by-one"), f"{story}, other ends clear the state one step early", _early(flags)),
            Hypothesis((cause, "index-not-mask"), f"{story}, others clear rows 0 and 1", _by_value(flags)),
            Hypothesis((cause, "resets-everybody"), f"{story}, others clear every environment", _anyone(flags)),
        ]
    return pairs


def _by_value(ends: Tensor) -> Tensor:
    """`state[flags]` with 0/1 flags: row 0 is cleared if any flag is 0, row 1 if any is 1."""
    cleared = torch.zeros_like(ends)
    cleared[:, 0] = (~ends).any(1)
    if ends.shape[1] > 1:
        cleared[:, 1] = ends.any(1)
    return cleared


def _anyone(ends: Tensor) -> Tensor:
    return ends.any(1, keepdim=True).expand_as(ends).clone()


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
