"""The rollout leg by itself: does it remember, keep environments apart, and forget when an episode ends?"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.doctor import hypotheses
from holdfast.doctor.checks.base import Case, NotApplicable, check, place
from holdfast.doctor.checks.steadiness import quieten_batch_norm
from holdfast.doctor.exam import Exam
from holdfast.doctor.script import TOTAL
from holdfast.doctor.traces import Gap

REACH = (1, 2, 5, 9)


@check("remembers", "what was seen earlier matters")
def remembers(case: Case) -> str:
    exam = case.exam
    going_on = exam.alone(torch.zeros_like(exam.true_resets))
    largest = 0.0
    for t in REACH:
        fresh = exam.alone(torch.ones_like(exam.true_resets), t, t + 1)
        now = going_on.cut(t, t + 1)
        gap = exam.ruler.gap(now, fresh)
        if gap.any:
            largest = max(largest, gap.largest)
    if largest == 0.0:
        case.report(
            "memoryless",
            f"steps {', '.join(map(str, REACH))} of a run give exactly what they give as the first step of one: the "
            f"{exam.rows} environments were followed without an episode end",
        )
        exam.rollout_resets = torch.ones_like(exam.true_resets)
    return f"with and without a past, outputs differ by up to {largest:.2g}"


@check("environments-apart", "an environment's steps depend on its own observations only")
def environments_apart(case: Case) -> str:
    exam = case.exam
    if exam.rows == 1:
        raise NotApplicable("it runs one environment only")
    touched = _touched(exam)
    if not any(rows for _, rows, _ in touched):
        return "changing one environment's observation changes no other's output"
    if quieten_batch_norm(exam) and not any(rows for _, rows, _ in _touched(exam)):
        case.report("batch-statistics", _who(touched) + "; with BatchNorm in eval mode nobody does")
        return ""
    # a 2-D input that a sequence layer takes for one sequence: row b reaches the rows after it, at once
    downward = all(all(row > mine for row in at_once) for mine, _, at_once in touched)
    someone = any(at_once for _, _, at_once in touched)
    case.report("layout-swapped" if downward and someone else "wrong-environment", _who(touched))
    return ""


def _touched(exam: Exam) -> list[tuple[int, list[int], list[int]]]:
    """(environment whose observation changed, others that felt it, those that felt it in the same step)."""
    found = []
    for step, row in ((3, 0), (7, exam.rows // 2), (14, exam.rows - 1)):
        changed = exam.run(0, step + 6, obs=exam.script.perturbed(step, row))
        gap = exam.ruler.gap(changed, exam.rollout().cut(0, step + 6))
        others = [b for b in gap.differs.any(0).nonzero().flatten().tolist() if b != row]
        at_once = [b for b in gap.differs[step].nonzero().flatten().tolist() if b != row]
        found.append((row, others, at_once))
    return found


def _who(touched: list[tuple[int, list[int], list[int]]]) -> str:
    row, others, _ = next(item for item in touched if item[1])
    return f"when only env {row} observes something else, the outputs of env {', '.join(map(str, others))} change"


@check("rollout-resets", "at the start of an episode the rollout has forgotten the one before, and nothing else")
def rollout_resets(case: Case) -> str:
    exam = case.exam
    if exam.subject.carries_across_episodes:
        raise NotApplicable("by declaration: memory goes on across episodes")
    if "memoryless" in case.earlier:
        raise NotApplicable("it remembers nothing")
    rollout = exam.rollout()
    gap = exam.ruler.gap(rollout, exam.alone(exam.true_resets))
    ends = int(exam.true_resets.sum()) - exam.rows
    if not gap.any:
        return f"{ends} episode ends, each as good as a fresh start (largest difference {gap.largest:.1g})"
    for guess in hypotheses.of_a_rollout(exam.script):
        if not exam.ruler.gap(rollout, exam.alone(guess.resets)).any:
            exam.rollout_resets = guess.resets
            case.report(guess.causes[0], f"{_first_gap(gap)}; the whole run is explained by: {guess.story}")
            return ""
    exam.rollout_resets = None
    cause, evidence = _unexplained(exam, gap)
    case.report(cause, evidence)
    return ""


def _unexplained(exam: Exam, gap: Gap) -> tuple[str, str]:
    """No rule fits. Trouble that begins at episode starts is a reset that does half its work."""
    starts, clean = _onsets(gap, exam.true_resets)
    where = _first_gap(gap)
    if starts and not any(not at_start for at_start in starts):
        return "partial-reset", f"{where}; {sum(starts)} of {sum(starts) + clean} episode starts are not clean"
    return "wrong-environment", f"{where}, where no episode had ended: no rule of resets explains it"


def _onsets(gap: Gap, resets: Tensor) -> tuple[list[bool], int]:
    """For every place where trouble begins, whether it is an episode's start; and how many starts are clean."""
    differs = gap.differs
    found = []
    for row in range(differs.shape[1]):
        for step in range(differs.shape[0]):
            fresh = bool(resets[step, row])
            if differs[step, row] and (step == 0 or fresh or not differs[step - 1, row]):
                found.append(fresh)
    clean = int((resets.cpu() & ~differs)[1:].sum())
    return found, clean


def _first_gap(gap: Gap) -> str:
    step, row = gap.first_place()
    return f"outputs differ from the same episode played alone by up to {gap.largest:.2g}, first at {place(step, row)}"


@check("missing-flags", "no flags means no reset")
def missing_flags(case: Case) -> str:
    exam = case.exam
    if not exam.subject.flags_optional:
        raise NotApplicable("its rollout leg always takes flags")
    silent = exam.run(0, TOTAL // 3, flags="none")
    told = exam.alone(torch.zeros_like(exam.true_resets), 0, TOTAL // 3)
    gap = exam.ruler.gap(silent, told)
    if gap.any:
        fresh = exam.alone(torch.ones_like(exam.true_resets), 0, TOTAL // 3)
        every = not exam.ruler.gap(silent, fresh).any
        story = "it equals a policy that is reset at every step" if every else "it follows no rule that we know"
        step, row = gap.first_place()
        case.report(
            "missing-flags-reset",
            f"without flags the outputs differ by up to {gap.largest:.2g} from those with all flags False, first at "
            f"{place(step, row)}; {story}",
        )
    return "without flags it gives what it gives with all flags False"
