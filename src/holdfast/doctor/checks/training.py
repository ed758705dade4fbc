"""The training leg: does re-running a stored segment give what the rollout gave, whatever is in it?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.doctor import hypotheses
from holdfast.doctor.checks.base import Case, NotApplicable, check, place
from holdfast.doctor.checks.steadiness import quieten_batch_norm
from holdfast.doctor.exam import Exam, Gap, Trace, fill, to_numbers
from holdfast.doctor.observations import map_tensors, tensors_in
from holdfast.doctor.script import STEPS
from holdfast.doctor.subject import NotOffered


@check("stored-state", "what is stored at the start of a segment stays as it was")
def stored_state(case: Case) -> str:
    exam = case.exam
    rollout = exam.rollout()
    stored = [
        (t, mark, copy) for t, (mark, copy) in enumerate(zip(rollout.marks, rollout.mark_copies)) if tensors_in(mark)
    ]
    if not stored:
        raise NotApplicable("it stores no tensors at a segment's start")
    for t, mark, copy in stored:
        for now, then in zip(tensors_in(mark), tensors_in(copy)):
            if now.shape != then.shape or not torch.equal(now.nan_to_num(), then.nan_to_num()):
                moved = float((now - then).abs().max()) if now.shape == then.shape else float("inf")
                case.report(
                    "start-state-aliased",
                    f"the state stored before t={t} had changed by {moved:.2g} when the run was over",
                )
                return ""
    return f"{len(stored)} stored states, none changed afterwards"


@check("training-rows", "in training, a row depends on its own environment, its own state and its own past")
def training_rows(case: Case) -> str:
    exam = case.exam
    found = _influences(exam)
    if _stray(found) and quieten_batch_norm(exam) and not _stray(_influences(exam)):
        case.report("batch-statistics", _describe(found) + "; with BatchNorm in eval mode nothing strays")
        return ""
    if not _stray(found):
        return _start_states_apart(case)
    if any(all(_fits(reading, item, exam.rows) for item in found) for reading in READINGS):
        case.report("layout-swapped", _describe(found))
    elif all(all(row == mine for _, row in reached) for _, mine, reached in found):
        case.report("sees-the-future", _describe(found))
    else:
        case.report("wrong-environment", _describe(found))
    return ""


Influence = tuple[int, int, list[tuple[int, int]]]  # step and row that changed; the (step, row)s that felt it


def _influences(exam: Exam) -> list[Influence]:
    first, last = exam.windows()[1]
    segment, found = exam.segment(first, last), []
    usual = exam.replayed(first, last)
    for step, row in zip((3, 4, 7, 9, 10), _spaced(exam.rows)):
        obs = map_tensors(lambda x: x[first:last], exam.script.perturbed(first + step, row))
        gap = exam.ruler.gap(exam.replay(segment.with_(obs=obs)), usual)
        found.append((step, row, [(t, b) for t, b in gap.differs.nonzero().tolist()]))
    return found


def _spaced(rows: int) -> list[int]:
    """Five rows from the first to the last, some more than once when there are fewer."""
    return [round(i * (rows - 1) / 4) for i in range(5)]


def _stray(found: list[Influence]) -> bool:
    return any(b != row or t < step for step, row, reached in found for t, b in reached)


Reading = tuple[Callable[[int, int, int], tuple[int, int]], bool]  # (step, row, rows) -> where it is taken to be; and
# whether the outputs are put back to where they belong

READINGS: list[Reading] = [
    (reading, put_back)
    for reading in (
        lambda t, b, rows: (b, t),  # rows are taken for steps
        lambda t, b, rows: ((t * rows + b) % STEPS, (t * rows + b) // STEPS),  # time-major read as batch-major
        lambda t, b, rows: ((b * STEPS + t) // rows, (b * STEPS + t) % rows),  # batch-major read as time-major
    )
    for put_back in (True, False)
]


def _fits(reading: Reading, influence: Influence, rows: int) -> bool:
    """Whether an influence is that of one row's past, when steps and rows are confused in this way."""
    where, put_back = reading
    step, row, reached = influence
    taken_step, taken_row = where(step, row, rows)
    places = [where(t, b, rows) if put_back else (t, b) for t, b in reached]
    return all(b == taken_row and t >= taken_step for t, b in places)


def _describe(found: list[Influence]) -> str:
    step, row, reached = next(item for item in found if _stray([item]))
    stray = [(t, b) for t, b in reached if b != row or t < step]
    t, b = stray[0]
    return (
        f"changing the observation of env {row} at step {step} of a segment changes {len(stray)} outputs that it must "
        f"not reach, such as env {b} at step {t}"
    )


def _start_states_apart(case: Case) -> str:
    """Another past of one environment must change that environment's row of the next segment, and no other."""
    exam = case.exam
    first, last = exam.windows()[1]
    going_on = [b for b in range(exam.rows) if not exam.true_resets[first, b]]
    if exam.rows == 1 or not going_on:
        return "rows depend on their own observations only"
    row = going_on[len(going_on) // 2]
    other = exam.run(0, last, obs=exam.script.perturbed(first - 1, row), marks=True)
    other.actions = exam.rollout().actions
    gap = exam.ruler.gap(exam.replay(exam.segment(first, last, other)), exam.replayed(first, last))
    strangers = [b for b in gap.differs.any(0).nonzero().flatten().tolist() if b != row]
    if strangers:
        case.report(
            "wrong-environment",
            f"another past of env {row} changes what training gives for env {', '.join(map(str, strangers))} "
            f"(by {gap.largest:.2g}): rows start from another environment's state",
        )
    return "rows depend on their own observations and their own past only"


@check("replay", "training on unchanged weights gives what the rollout gave")
def replay(case: Case) -> str:
    exam = case.exam
    rollout = exam.rollout()
    gaps = {w: exam.ruler.gap(exam.replayed(*w), rollout.cut(*w)) for w in exam.windows()}
    right = exam.rollout_resets is not None and torch.equal(exam.rollout_resets, exam.true_resets)
    if not any(gap.any for gap in gaps.values()):
        largest = max(gap.largest for gap in gaps.values())
        return f"{len(gaps)} segments agree with the rollout{'' if right else ', mistakes included'} (largest difference {largest:.1g})"
    window, gap = next((w, g) for w, g in gaps.items() if g.any)
    evidence = _ratio(exam, window, gap)
    if exam.rollout_resets is None:
        case.report("legs-differ", f"{evidence}; the rollout leg itself follows no rule", because_of="any")
        return ""
    if not right and _follows(exam, exam.rollout_resets, exam.true_resets):
        case.report("legs-differ", f"{evidence}: training resets rightly, the rollout does not", because_of="any")
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
                f"run as a call over t={window[0]}..{window[1] - 1} the outputs differ by up to {gap.largest:.2g} from the "
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
                f"in minibatches the outputs differ by up to {gap.largest:.2g}, first at {place(window[0] + step, row)}",
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


@check("padding", "padded steps change nothing")
def padding(case: Case) -> str:
    exam = case.exam
    if not exam.subject.pads:
        raise NotApplicable("its training leg takes no padded rows")
    first, last = exam.windows()[1]
    segment = exam.segment(first, last)
    lengths = torch.tensor([STEPS - (3 * b) % 7 for b in range(exam.rows)])
    padded = torch.arange(STEPS).unsqueeze(1) >= lengths  # [T, B]

    def other(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(padded.reshape(*padded.shape, *[1] * (x.dim() - 2)), y, x)

    from holdfast.doctor.script import zip_tensors

    noise = map_tensors(lambda x: x[first:last], exam.script.other_obs)
    plain = exam.replay_with_graph(segment.with_(lengths=lengths))
    noisy = exam.replay_with_graph(segment.with_(lengths=lengths, obs=zip_tensors(other, segment.obs, noise)))
    worst = 0.0
    for a, b in zip(tensors_in(plain.state), tensors_in(noisy.state)):
        worst = max(worst, float((a - b).detach().abs().max()))
    outputs = (plain.output - noisy.output).detach().abs().amax(-1)[~padded]
    worst = max(worst, float(outputs.max()))
    if worst > 10 * exam.tolerance:
        case.report("padding-leaks", f"other numbers in the padding change the result by {worst:.2g}")
    return "other numbers in the padding change nothing"
