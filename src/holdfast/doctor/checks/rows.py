"""What training is fed with: stored states that stay, rows that depend on their own past, padding that does nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.doctor.checks.base import Case, NotApplicable, check
from holdfast.doctor.checks.steadiness import quieten_batch_norm
from holdfast.doctor.exam import Exam
from holdfast.doctor.observations import map_tensors, tensors_in
from holdfast.doctor.script import STEPS, zip_tensors


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
        return torch.where(padded.to(x.device).reshape(*padded.shape, *[1] * (x.dim() - 2)), y, x)

    noise = map_tensors(lambda x: x[first:last], exam.script.other_obs)
    plain = exam.replay_with_graph(segment.with_(lengths=lengths))
    noisy = exam.replay_with_graph(segment.with_(lengths=lengths, obs=zip_tensors(other, segment.obs, noise)))
    worst = 0.0
    for a, b in zip(tensors_in(plain.state), tensors_in(noisy.state)):
        worst = max(worst, float((a - b).detach().abs().max()))
    outputs = (plain.output - noisy.output).detach().abs().amax(-1).cpu()[~padded]
    worst = max(worst, float(outputs.max()))
    if worst > 10 * exam.tolerance:
        case.report("padding-leaks", f"other numbers in the padding change the result by {worst:.2g}")
    return "other numbers in the padding change nothing"
