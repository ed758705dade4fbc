"""The rollout leg: does it remember, keep environments apart, and forget when an episode ends?"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from holdfast.doctor import hypotheses
from holdfast.doctor.checks.base import CARRIES_ON, Case, NotApplicable, by_how_much, check
from holdfast.doctor.checks.repeatability import hold_batch_norm
from holdfast.doctor.comparison import Difference
from holdfast.doctor.recordings import Recordings
from holdfast.doctor.script import TOTAL

REACH = (1, 2, 5, 9)


@check("remembers", "what was seen earlier matters")
def remembers(case: Case) -> str:
    recordings = case.recordings
    going_on = recordings.alone(torch.zeros_like(recordings.true_resets))
    largest = 0.0
    for t in REACH:
        fresh = recordings.alone(torch.ones_like(recordings.true_resets), t, t + 1)
        now = going_on.cut(t, t + 1)
        difference = recordings.compare(now, fresh)
        if difference.any:
            largest = max(largest, difference.largest)
    if largest == 0.0:
        case.report(
            "memoryless",
            f"steps {', '.join(map(str, REACH))} of a run without an episode end give exactly what they give as its first "
            f"step, in all {recordings.rows} environments",
        )
        recordings.rollout_resets = torch.ones_like(recordings.true_resets)
    return f"with and without a past, outputs differ by up to {largest:.2g}"


@check("environments-apart", "an environment's steps depend on its own observations only")
def environments_apart(case: Case) -> str:
    recordings = case.recordings
    if recordings.rows == 1:
        raise NotApplicable("it runs one environment only")
    touched = _touched(recordings)
    if not any(rows for _, rows, _ in touched):
        return "changing one environment's observation changes no other's output"
    if hold_batch_norm(recordings) and not any(rows for _, rows, _ in _touched(recordings)):
        return case.report(
            "batch-statistics", _who(touched) + "; with BatchNorm in eval mode they do not", removed=True
        )
    # A sequence layer takes a 2-D input for one sequence, so row b reaches the rows after it in the same step.
    downward = all(all(row > mine for row in at_once) for mine, _, at_once in touched)
    someone = any(at_once for _, _, at_once in touched)
    return case.report("layout-swapped" if downward and someone else "wrong-environment", _who(touched))


def _touched(recordings: Recordings) -> list[tuple[int, list[int], list[int]]]:
    """(environment whose observation changed, others that changed with it, those that did in the same step)."""
    found = []
    for step, row in ((3, 0), (7, recordings.rows // 2), (14, recordings.rows - 1)):
        changed = recordings.run(0, step + 6, obs=recordings.script.perturbed(step, row))
        difference = recordings.compare(changed, recordings.rollout().cut(0, step + 6))
        others = [b for b in difference.where.any(0).nonzero().flatten().tolist() if b != row]
        at_once = [b for b in difference.where[step].nonzero().flatten().tolist() if b != row]
        found.append((row, others, at_once))
    return found


def _who(touched: list[tuple[int, list[int], list[int]]]) -> str:
    row, others, _ = next(item for item in touched if item[1])
    return f"when only the observation of env {row} changes, the outputs of env {', '.join(map(str, others))} change"


@check("rollout-resets", "at the start of an episode the rollout has forgotten the previous episode, and nothing else")
def rollout_resets(case: Case) -> str:
    recordings = case.recordings
    if recordings.subject.carries_across_episodes:
        raise NotApplicable(CARRIES_ON)
    if "memoryless" in case.earlier:
        raise NotApplicable("it remembers nothing")
    rollout = recordings.rollout()
    difference = recordings.compare(rollout, recordings.alone(recordings.true_resets))
    ends = int(recordings.true_resets.sum()) - recordings.rows
    if difference.any and _rollouts_start_fresh(case):
        difference = recordings.compare(rollout, recordings.alone(recordings.true_resets))
    if not difference.any:
        together = _all_at_once(recordings)
        if together.any:
            return case.report(
                "common-ends-ignored", f"{_first_difference(together)}, where all environments start an episode"
            )
        return f"{ends} episode ends, each followed by a fresh start (largest difference {difference.largest:.1g})"
    for guess in hypotheses.of_a_rollout(recordings.script):
        resets = guess.resets | recordings.rollout_starts if recordings.fresh_rollouts else guess.resets
        if not recordings.compare(rollout, recordings.alone(resets)).any:
            recordings.rollout_resets = resets
            evidence = f"{_first_difference(difference)}; the whole run is explained by: {guess.story}"
            for cause in guess.causes:
                case.report(cause, evidence, explained="layout-swapped" not in case.earlier)
            return ""
    recordings.rollout_resets = None
    cause, evidence = _unexplained(recordings, difference)
    return case.report(cause, evidence)


def _rollouts_start_fresh(case: Case) -> bool:
    """Whether memory is empty where the subject says that rollouts start, under some rule of resets. That is no mistake."""
    recordings = case.recordings
    starts = recordings.rollout_starts
    rules = [recordings.true_resets, *(rule.resets for rule in hypotheses.of_a_rollout(recordings.script))]
    if not bool(starts.any()) or all(
        recordings.compare(recordings.rollout(), recordings.alone(resets | starts)).any for resets in rules
    ):
        return False
    steps = ", ".join(map(str, starts[:, 0].nonzero().flatten().tolist()))
    case.report("rollouts-start-fresh", f"memory is empty at t={steps}, where the subject says that a rollout starts")
    recordings.fresh_rollouts = True
    recordings.true_resets = recordings.rollout_resets = recordings.true_resets | starts
    return True


def _all_at_once(recordings: Recordings) -> Difference:
    """The same run with one more end, of all environments at the same step, compared with episodes played alone."""
    t = TOTAL - 5
    truncated = recordings.script.truncated.clone()
    truncated[t] = True
    other = copy.copy(recordings)
    other.script = replace(recordings.script, truncated=truncated)
    expected = other.script.resets | recordings.rollout_starts if recordings.fresh_rollouts else other.script.resets
    return recordings.compare(other.run(0, t + 3), recordings.alone(expected, 0, t + 3))


def _unexplained(recordings: Recordings, difference: Difference) -> tuple[str, str]:
    """No rule fits. If every row is right until its first episode ends, its resets are incomplete."""
    episode = recordings.true_resets.cpu().long().cumsum(0)  # [N, B] which one of its row each step belongs to, from 1
    where = _first_difference(difference)
    if not bool((difference.where & (episode == 1)).any()):
        rows = torch.arange(recordings.rows).expand_as(episode)
        unclean = torch.stack([rows, episode], -1)[difference.where].unique(dim=0)
        following = int((episode[-1] - 1).sum())
        return "partial-reset", f"{where}; {len(unclean)} of {following} episodes that follow another are not clean"
    return "wrong-environment", f"{where}, where no episode had ended: no rule of resets explains it"


def _first_difference(difference: Difference) -> str:
    return f"outputs differ from the same episode played alone {by_how_much(difference)}"


@check("missing-flags", "no flags means no reset")
def missing_flags(case: Case) -> str:
    recordings = case.recordings
    if not recordings.subject.flags_optional:
        raise NotApplicable("its rollout leg always takes flags")
    without = recordings.run(0, TOTAL // 3, flags="none")
    all_false = recordings.alone(torch.zeros_like(recordings.true_resets), 0, TOTAL // 3)
    difference = recordings.compare(without, all_false)
    if difference.any:
        fresh = recordings.alone(torch.ones_like(recordings.true_resets), 0, TOTAL // 3)
        every = not recordings.compare(without, fresh).any
        story = "it equals a policy that is reset at every step" if every else "it follows no known rule"
        case.report(
            "missing-flags-reset",
            f"without flags the outputs differ from those with all flags False {by_how_much(difference)}; {story}",
        )
    return "without flags it gives what it gives with all flags False"
