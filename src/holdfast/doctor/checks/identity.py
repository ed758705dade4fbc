"""Who is who: rows by environment id, other batch sizes, a poisoned neighbour, a second agent."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.doctor.checks.base import Case, NotApplicable, check, place
from holdfast.doctor.exam import Exam
from holdfast.doctor.observations import map_tensors
from holdfast.doctor.script import STEPS
from holdfast.doctor.subject import NotOffered, Step
from holdfast.doctor.traces import Trace, fill


@check("nan", "a broken environment heals with its next episode, and harms no other")
def nan(case: Case) -> str:
    exam = case.exam
    if exam.subject.carries_across_episodes:
        raise NotApplicable("by declaration: memory goes on across episodes")
    step, row = exam.true_resets[2:].nonzero()[0].tolist()
    step += 2
    try:
        after = _poisoned(exam, step, row)
    except (RuntimeError, ValueError) as error:
        if not any(word in str(error).lower() for word in ("nan", "inf", "constraint", "finite")):
            raise
        case.report(
            "nan-survives", f"NaN in the state of env {row} before its reset at t={step} ends in: {_short(error)}"
        )
        return ""
    usual = exam.rollout().cut(step, step + 3)
    if not bool(after.output[:, row].isfinite().all()):
        case.report("nan-survives", f"NaN in the state of env {row} is still there after its reset at t={step}")
    others = [b for b in range(exam.rows) if b != row]
    gap = exam.ruler.gap(after, usual)
    if others and bool(gap.differs[:, others].any()):
        reached = [b for b in others if bool(gap.differs[:, b].any())]
        case.report(
            "wrong-environment",
            f"NaN in the state of env {row} changes the outputs of env {', '.join(map(str, reached))}",
        )
    return f"NaN in the state of env {row} is gone after its reset; the others are as they were"


def _poisoned(exam: Exam, step: int, row: int) -> Trace:
    """The three steps from an episode's start on, one environment's state having been NaN just before."""
    subject, story = exam.subject, exam.script.obs
    subject.begin(exam.rows)
    steps: list[Step] = []
    for t in range(step + 3):
        if t == step:
            try:
                subject.poison(row)
            except NotOffered:
                raise NotApplicable("its state cannot be set from outside") from None
        result = exam.step(t, story, exam.flags_at(t, True, t == 0))
        if t >= step:
            steps.append(result)
    return fill(Trace(torch.empty(0), None, None, step), steps)


def _short(error: Exception) -> str:
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line if len(line) <= 110 else line[:110].rsplit(" ", 1)[0] + " ..."


@check("environment-ids", "memory follows the environment's id, in any order and in any company")
def environment_ids(case: Case) -> str:
    exam = case.exam
    if not exam.subject.takes_env_ids:
        raise NotApplicable("its states are passed row by row, without ids")
    everyone = list(range(exam.rows))
    odd, even = everyone[1::2], everyone[::2]
    orders: dict[str, list[list[list[int]]]] = {
        "in an order that changes": [[everyone], [everyone[::-1]]],
        "in two groups, one after the other": [[odd, even]],
        "in groups that change": [[odd, even], [everyone[::-1]], [everyone[:2], everyone[2:][::-1]]],
    }
    for story, rounds in orders.items():
        gap = exam.ruler.gap(_in_groups(exam, rounds), exam.rollout().cut(0, STEPS))
        if gap.any:
            step, row = gap.first_place()
            case.report(
                "wrong-environment",
                f"stepped {story}, outputs differ by up to {gap.largest:.2g} from stepping all in order, "
                f"first at {place(step, row)}",
            )
            return ""
    return "in changing order and changing groups, every environment keeps its own memory"


def _in_groups(exam: Exam, rounds: list[list[list[int]]]) -> Trace:
    """Every step in the groups of its round, round after round."""
    exam.subject.begin(exam.rows)
    steps = []
    for t in range(STEPS):
        rows: dict[int, Tensor] = {}
        flags = exam.flags_at(t, True, t == 0)
        for group in filter(None, rounds[t % len(rounds)]):
            ids = torch.tensor(group)
            obs = map_tensors(lambda x, t=t, ids=ids: x[t][ids.to(x.device)], exam.script.obs)
            if exam.script.action_masks is not None:
                exam.subject.action_mask = exam.script.action_masks[t][ids]
            output = exam.subject.step(obs, flags[0][ids], flags[1][ids], ids).output
            rows.update(zip(group, output))
        steps.append(Step(torch.stack([rows[b] for b in range(exam.rows)])))
    return fill(Trace(torch.empty(0), None, None), steps)


@check("batch-size", "another number of environments is no problem")
def batch_size(case: Case) -> str:
    exam = case.exam
    if exam.rows == 1:
        raise NotApplicable("it runs one environment only")
    sizes = [exam.rows, max(2, exam.rows - 2), 1, exam.rows]
    exam.subject.begin(exam.rows)
    for i, size in enumerate(sizes):
        if i:
            exam.subject.change_batch(size)
        try:
            _steps_with(exam, size)
        except Exception as error:
            case.report(
                "batch-size-baked-in",
                f"after {sizes[i - 1] if i else 'no'} environments, {size} of them end in "
                f"{type(error).__name__}: {_short(error)}",
            )
            return ""
    return f"{', '.join(map(str, sizes))} environments, one after the other"


def _steps_with(exam: Exam, size: int, count: int = 3) -> None:
    none = torch.zeros(size, dtype=torch.bool, device=exam.script.terminated.device)
    for t in range(count):
        if exam.script.action_masks is not None:
            exam.subject.action_mask = exam.script.action_masks[t, :size]
        obs = map_tensors(lambda x, t=t: x[t, :size], exam.script.obs)
        exam.subject.step(obs, none, none, torch.arange(size))


@check("agents", "agents that share a network do not share its memory")
def agents(case: Case) -> str:
    exam = case.exam
    other = exam.subject.second_agent()
    mine, story = exam.subject, exam.script
    mine.begin(exam.rows)
    other.begin(exam.rows)
    steps: list[Step] = []
    for t in range(STEPS):
        steps.append(exam.step(t, story.obs, exam.flags_at(t, True, t == 0), mine))
        exam.step(t, story.other_obs, exam.flags_at(t, None, False), other)
    gap = exam.ruler.gap(fill(Trace(torch.empty(0), None, None), steps), exam.rollout().cut(0, STEPS))
    if gap.any:
        step, row = gap.first_place()
        case.report(
            "shared-between-agents",
            f"a second agent's steps change the first one's outputs by up to {gap.largest:.2g}, first at "
            f"{place(step, row)}",
        )
    return "a second agent's steps leave the first one's outputs as they were"
