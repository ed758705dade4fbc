"""The rows of training: stored states stay as they are, a row depends on its own past only, padding has no effect."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.doctor.checks.base import Case, NotApplicable, check
from holdfast.doctor.checks.repeatability import hold_batch_norm
from holdfast.doctor.comparison import to_numbers
from holdfast.doctor.recordings import Recordings
from holdfast.doctor.script import STEPS
from holdfast.state import map_tensors, tensors_in, tree_map


@check("stored-state", "what is stored at the start of a segment stays as it was")
def stored_state(case: Case) -> str:
    recordings = case.recordings
    rollout = recordings.rollout()
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
                    f"the state stored before t={t} had changed by {moved:.2g} at the end of the run",
                    removed=True,
                )
                recordings.use_copies_of_marks()
                return ""
    return f"{len(stored)} stored states, none changed afterwards"


@check("training-rows", "in training, a row depends on its own environment, its own state and its own past")
def training_rows(case: Case) -> str:
    recordings = case.recordings
    found = _influences(recordings)
    if _stray(found) and hold_batch_norm(recordings) and not _stray(_influences(recordings)):
        return case.report(
            "batch-statistics", _describe(found) + "; with BatchNorm in eval mode it does not", removed=True
        )
    if not _stray(found):
        return _start_states_separate(case)
    if any(all(_fits(reading, item, recordings.rows) for item in found) for reading in READINGS):
        case.report("layout-swapped", _describe(found))
    elif all(all(row == mine for _, row in reached) for _, mine, reached in found):
        case.report("sees-the-future", _describe(found))
    else:
        case.report("wrong-environment", _describe(found))
    return ""


Influence = tuple[int, int, list[tuple[int, int]]]  # step and row that changed; the (step, row)s that it reached


def _influences(recordings: Recordings) -> list[Influence]:
    first, last = recordings.window
    segment, found = recordings.segment(first, last), []
    usual = recordings.replayed(first, last)
    rows = [round(i * (recordings.rows - 1) / 4) for i in range(5)]  # from the first to the last
    for step, row in zip((3, 4, 7, 9, 10), rows):
        obs = map_tensors(lambda x: x[first:last], recordings.script.perturbed(first + step, row))
        difference = recordings.compare(recordings.replay(segment.with_(obs=obs)), usual)
        found.append((step, row, [(t, b) for t, b in difference.where.nonzero().tolist()]))
    return found


def _stray(found: list[Influence]) -> bool:
    return any(b != row or t < step for step, row, reached in found for t, b in reached)


# (step, row, rows) -> the (step, row) it is mistaken for; and whether outputs are moved back to where they belong
Reading = tuple[Callable[[int, int, int], tuple[int, int]], bool]

READINGS: list[Reading] = [
    (reading, moved_back)
    for reading in (
        lambda t, b, rows: (b, t),  # rows read as steps
        lambda t, b, rows: ((t * rows + b) % STEPS, (t * rows + b) // STEPS),  # time-major read as batch-major
        lambda t, b, rows: ((b * STEPS + t) // rows, (b * STEPS + t) % rows),  # batch-major read as time-major
    )
    for moved_back in (True, False)
]


def _fits(reading: Reading, influence: Influence, rows: int) -> bool:
    """Whether an influence is that of one row's past, when steps and rows are confused in this way."""
    where, moved_back = reading
    step, row, reached = influence
    taken_step, taken_row = where(step, row, rows)
    places = [where(t, b, rows) if moved_back else (t, b) for t, b in reached]
    return all(b == taken_row and t >= taken_step for t, b in places)


def _describe(found: list[Influence]) -> str:
    step, row, reached = next(item for item in found if _stray([item]))
    stray = [(t, b) for t, b in reached if b != row or t < step]
    t, b = stray[0]
    return (
        f"changing the observation of env {row} at step {step} of a segment changes {len(stray)} outputs that it must "
        f"not reach, such as env {b} at step {t}"
    )


def _start_states_separate(case: Case) -> str:
    """A different past of one environment must change its row of the next segment, and no other."""
    recordings = case.recordings
    first, last = recordings.window
    going_on = [b for b in range(recordings.rows) if not recordings.true_resets[first, b]]
    if recordings.rows == 1 or not going_on:
        return "rows depend on their own observations only"
    row = going_on[len(going_on) // 2]
    other = recordings.run(0, last, obs=recordings.script.perturbed(first - 1, row), marks=True)
    other.actions = recordings.rollout().actions
    difference = recordings.compare(
        recordings.replay(recordings.segment(first, last, other)), recordings.replayed(first, last)
    )
    strangers = [b for b in difference.where.any(0).nonzero().flatten().tolist() if b != row]
    if strangers:
        case.report(
            "wrong-environment",
            f"a different past of env {row} changes what training computes for env {', '.join(map(str, strangers))} "
            f"(by {difference.largest:.2g}): rows start from another environment's state",
        )
    return "rows depend on their own observations and their own past only"


@check("padding", "padded steps change nothing")
def padding(case: Case) -> str:
    recordings = case.recordings
    if not recordings.subject.pads:
        raise NotApplicable("its training leg takes no padded rows")
    first, last = recordings.window
    segment = recordings.segment(first, last)
    lengths = torch.tensor([STEPS - (3 * b) % 7 for b in range(recordings.rows)])
    padded = torch.arange(STEPS).unsqueeze(1) >= lengths  # [T, B]

    def with_noise(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(padded.to(x.device).reshape(*padded.shape, *[1] * (x.dim() - 2)), y, x)

    noise = map_tensors(lambda x: x[first:last], recordings.script.other_obs)
    plain = recordings.replay_with_graph(segment.with_(lengths=lengths))
    noisy = recordings.replay_with_graph(segment.with_(lengths=lengths, obs=tree_map(with_noise, segment.obs, noise)))
    worst = 0.0
    for a, b in zip(tensors_in(plain.state), tensors_in(noisy.state)):
        worst = max(worst, float((to_numbers(a) - to_numbers(b)).abs().max()))
    outputs = (plain.output - noisy.output).detach().abs().amax(-1).cpu()[~padded]
    worst = max(worst, float(outputs.max()))
    if worst > 10 * recordings.tolerance:
        case.report("padding-leaks", f"other numbers in the padding change the result by {worst:.2g}")
    return "other numbers in the padding change nothing"
