"""The training leg: does re-running a stored segment give what the rollout gave, whatever is in it?"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.doctor import hypotheses
from holdfast.doctor.checks.base import Case, check, place
from holdfast.doctor.exam import Exam
from holdfast.doctor.observations import tensors_in
from holdfast.doctor.script import STEPS
from holdfast.doctor.subject import NotOffered
from holdfast.doctor.traces import Gap, Trace, fill, to_numbers


@check("replay", "training on unchanged weights gives what the rollout gave")
def replay(case: Case) -> str:
    exam = case.exam
    rollout = exam.rollout()
    gaps = {w: exam.ruler.gap(exam.replayed(*w), rollout.cut(*w)) for w in exam.windows()}
    right = exam.rollout_resets is not None and torch.equal(exam.rollout_resets, exam.true_resets)
    if not any(gap.any for gap in gaps.values()):
        largest = max(gap.largest for gap in gaps.values())
        agree = f"{len(gaps)} segments agree with the rollout{'' if right else ', mistakes included'}"
        return f"{agree} (largest difference {largest:.1g})"
    window, gap = next((w, g) for w, g in gaps.items() if g.any)
    evidence = _ratio(exam, window, gap)
    if exam.rollout_resets is None:
        case.report("legs-differ", f"{evidence}; the rollout leg itself follows no rule", because_of="any")
        return ""
    if not right and _follows(exam, exam.rollout_resets, exam.true_resets):
        case.report("legs-differ", f"{evidence}: training resets rightly, the rollout does not", because_of="any")
        return ""
    if exam.subject.carries_across_episodes and _follows(exam, exam.rollout_resets, exam.script.resets):
        case.report("legs-differ", f"{evidence}: the rollout carries memory on, as declared, and training clears it")
        return ""
    for causes, story in _explanations(exam):
        for cause in causes:
            same = cause in case.earlier or (cause == "reset-dropped-in-training" and "never-resets" in case.earlier)
            case.report(
                cause, f"{evidence}; all segments are explained by: {story}", because_of="any" if same else None
            )
        return ""
    cause, story = _unexplained(exam, gaps)
    case.report(cause, f"{evidence}; {story}")
    return ""


def _follows(exam: Exam, before: Tensor, resets: Tensor) -> bool:
    """Whether training equals the episodes alone when it follows `resets` from states that followed `before`."""
    for first, last in exam.windows():
        pattern = before.clone()
        pattern[first:last] = resets[first:last]
        if exam.ruler.gap(exam.replayed(first, last), exam.alone(pattern, first, last)).any:
            return False
    return True


def _explanations(exam: Exam) -> list[tuple[tuple[str, ...], str]]:
    """The rules that training is found to follow; empty when none fits every segment."""
    assert exam.rollout_resets is not None
    by_window = [hypotheses.of_training(exam.script, exam.rollout_resets, *w) for w in exam.windows()]
    fits = []
    for guesses in zip(*by_window):
        if all(
            not exam.ruler.gap(exam.replayed(*w), exam.alone(guess.resets, *w)).any
            for w, guess in zip(exam.windows(), guesses)
        ):
            fits.append((guesses[0].causes, guesses[0].story))
    if not fits and all(_starts_one_late(exam, *w) for w in exam.windows()[1:]):
        fits.append((("late-by-one",), "the stored start state is the one after the segment's first step"))
    return fits


def _starts_one_late(exam: Exam, first: int, last: int) -> bool:
    """Plays the segment's first step twice: what training would give from the state after it."""
    exam.subject.begin(exam.rows)
    for t in range(first + 1):
        exam.step(t, exam.script.obs, exam.flags_at(t, True, t == 0))
    steps = [exam.step(t, exam.script.obs, exam.flags_at(t, True, False)) for t in range(first, last)]
    again = fill(Trace(torch.empty(0), None, None, first), steps)
    return not exam.ruler.gap(exam.replayed(first, last), again).any


def _unexplained(exam: Exam, gaps: dict[tuple[int, int], Gap]) -> tuple[str, str]:
    """No rule of resets fits: tell by where the trouble begins."""
    if _only_until_the_first_reset(exam, gaps):
        return "wrong-start-state", "the difference begins with a segment and ends with its first episode end"
    begins = gaps[exam.windows()[0]].differs[0]
    if bool(begins.any()):
        return (
            "legs-differ",
            "they differ at the very first step of a run already, where there is no memory yet" + _rounding(exam, gaps),
        )
    for (first, _), gap in gaps.items():
        for row in range(exam.rows):
            trouble = gap.differs[:, row].nonzero().flatten().tolist()
            if trouble and trouble[0] != 0 and not exam.true_resets[first + trouble[0], row]:
                return "legs-differ", "they part in mid-episode, where nothing is reset" + _rounding(exam, gaps)
    return "partial-reset", "the difference begins where training should have cleared the state"


def _only_until_the_first_reset(exam: Exam, gaps: dict[tuple[int, int], Gap]) -> bool:
    """All trouble begins with a segment and is over when its first episode ends."""
    healed = False
    for (first, last), gap in gaps.items():
        for row in range(exam.rows):
            trouble = gap.differs[:, row].nonzero().flatten().tolist()
            ends = [t for t in range(int(first == 0), last - first) if exam.true_resets[first + t, row]]
            if trouble and (trouble[0] > 1 or (ends and max(trouble) >= ends[0])):
                return False
            healed |= bool(trouble and ends)
    return healed


def _rounding(exam: Exam, gaps: dict[tuple[int, int], Gap]) -> str:
    size = float(exam.rollout().output.abs().mean()) or 1.0
    relative = max(float(gap.raw.median()) for gap in gaps.values()) / size
    return (
        f" (typically by {relative:.1g} of their size: lower precision in one leg?)" if 1e-4 < relative < 2e-2 else ""
    )


def _ratio(exam: Exam, window: tuple[int, int], gap: Gap) -> str:
    step, row = gap.first_place()
    text = f"training differs from the rollout by up to {gap.largest:.2g}, first at {place(window[0] + step, row)}"
    mine, theirs = exam.replayed(*window).log_prob, exam.rollout().cut(*window).log_prob
    if mine is not None and theirs is not None:
        text += (
            f"; the probability ratio at epoch 0 is off by up to {float((mine - theirs).exp().sub(1).abs().max()):.2g}"
        )
    return text


@check("chunking", "however a sequence is cut into calls, the result is the same")
def chunking(case: Case) -> str:
    exam = case.exam
    first, last = exam.windows()[1]
    cuts = [(first, first + 5), (first + 5, last), (first + 1, first + 2), (first, 2 * STEPS + 4)]
    for window in cuts:
        gap = exam.ruler.gap(exam.replay(exam.segment(*window)), exam.rollout().cut(*window))
        standard_gap = any(exam.ruler.gap(exam.replayed(*w), exam.rollout().cut(*w)).any for w in exam.windows())
        if gap.any:
            step, row = gap.first_place()
            case.report(
                "depends-on-chunking",
                f"run as a call over t={window[0]}..{window[1] - 1} the outputs differ by up to "
                f"{gap.largest:.2g} from the "
                f"rollout, first at {place(window[0] + step, row)}",
                because_of="any" if standard_gap else None,
            )
            return ""
    return _minibatches(case) or _final_state(case)


def _minibatches(case: Case) -> str | None:
    """The project's own way of cutting a segment into minibatches, where it has one."""
    exam = case.exam
    for window in exam.windows():
        segment = exam.segment(*window)
        try:
            result = exam.subject.minibatches(segment)
        except NotOffered:
            return None
        trace = Trace(
            to_numbers(result.output),
            result.log_prob if result.log_prob is None else to_numbers(result.log_prob),
            segment.actions,
        )
        gap = exam.ruler.gap(trace, exam.replayed(*window))
        if gap.any:
            step, row = gap.first_place()
            case.report(
                "depends-on-chunking",
                f"in minibatches the outputs differ by up to {gap.largest:.2g}, first at "
                f"{place(window[0] + step, row)}",
            )
            return " "
    return None


def _final_state(case: Case) -> str:
    """Where the training leg returns a state, it must be the one that the rollout had there."""
    exam = case.exam
    for first, last in exam.windows():
        state = exam.replay_with_graph(exam.segment(first, last)).state
        mine, theirs = tensors_in(state), tensors_in(exam.rollout().mark_copies[last])
        if not mine or len(mine) != len(theirs) or any(a.shape != b.shape for a, b in zip(mine, theirs)):
            return "calls over 1, 5, 7 and 16 steps agree"
        gap = max(float((a.detach() - b).abs().max()) for a, b in zip(mine, theirs))
        if gap > 10 * exam.tolerance * max(1.0, max(float(b.abs().max()) for b in theirs)):
            case.report(
                "state-of-another-step",
                f"the state returned for t={first}..{last - 1} differs by {gap:.2g} from the state after t={last - 1}",
            )
            return ""
    return "calls over 1, 5, 7 and 16 steps agree, and the returned states are those of the last step"
