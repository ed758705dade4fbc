"""Each environment keeps its own memory: rows by id, other batch sizes, NaN in one of them, a second agent."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.doctor.checks.base import CARRIES_ON, Case, NotApplicable, by_how_much, check, first_line
from holdfast.doctor.comparison import Recording, record
from holdfast.doctor.recordings import Recordings
from holdfast.doctor.script import STEPS
from holdfast.doctor.subjects.base import SubjectStep
from holdfast.state import map_tensors


@check("nan", "a NaN in one environment ends with its episode and does not affect other environments")
def nan(case: Case) -> str:
    recordings = case.recordings
    if recordings.subject.carries_across_episodes:
        raise NotApplicable(CARRIES_ON)
    step, row = recordings.script.resets[2:].nonzero()[0].tolist()
    step += 2
    try:
        after = _poisoned(recordings, step, row)
    except (RuntimeError, ValueError) as error:
        if not any(word in str(error).lower() for word in ("nan", "inf", "constraint", "finite")):
            raise
        return case.report(
            "nan-survives", f"NaN in the state of env {row} before its reset at t={step} ends in: {first_line(error)}"
        )
    usual = recordings.rollout().cut(step, step + 3)
    if not bool(after.output[:, row].isfinite().all()):
        case.report("nan-survives", f"NaN in the state of env {row} is still there after its reset at t={step}")
    others = [b for b in range(recordings.rows) if b != row]
    difference = recordings.compare(after, usual)
    if others and bool(difference.where[:, others].any()):
        reached = [b for b in others if bool(difference.where[:, b].any())]
        case.report(
            "wrong-environment",
            f"NaN in the state of env {row} changes the outputs of env {', '.join(map(str, reached))}",
        )
    return f"NaN in the state of env {row} is gone after its reset; the others are unchanged"


def _poisoned(recordings: Recordings, step: int, row: int) -> Recording:
    """The three steps from an episode's start on; one environment's state was NaN just before."""
    recordings.play(0, step)
    recordings.subject.poison(row)
    return recordings.play(step, step + 3, begin=False)


@check("environment-ids", "memory follows the environment's id, in any order and any group")
def environment_ids(case: Case) -> str:
    recordings = case.recordings
    if not recordings.subject.takes_env_ids:
        raise NotApplicable("its states are passed row by row, without ids")
    everyone = list(range(recordings.rows))
    odd, even = everyone[1::2], everyone[::2]
    orders: dict[str, list[list[list[int]]]] = {
        "in a changing order": [[everyone], [everyone[::-1]]],
        "in two groups, one after the other": [[odd, even]],
        "in changing groups": [[odd, even], [everyone[::-1]], [everyone[:2], everyone[2:][::-1]]],
    }
    for how, rounds in orders.items():
        difference = recordings.compare(_in_groups(recordings, rounds), recordings.rollout().cut(0, STEPS))
        if difference.any:
            return case.report(
                "wrong-environment",
                f"stepped {how}, outputs differ from stepping all in order {by_how_much(difference)}",
            )
    return "in changing order and changing groups, every environment keeps its own memory"


def _in_groups(recordings: Recordings, rounds: list[list[list[int]]]) -> Recording:
    """Every step in the groups of its round."""
    recordings.subject.begin(recordings.rows)
    steps = []
    for t in range(STEPS):
        rows: dict[int, Tensor] = {}
        flags = recordings.flags_at(t, is_first=t == 0)
        for group in filter(None, rounds[t % len(rounds)]):
            ids = torch.tensor(group)
            obs = map_tensors(lambda x, t=t, ids=ids: x[t][ids.to(x.device)], recordings.script.obs)
            if recordings.script.action_masks is not None:
                recordings.subject.action_mask = recordings.script.action_masks[t][ids]
            output = recordings.subject.step(obs, flags[0][ids], flags[1][ids], ids).output
            rows.update(zip(group, output))
        steps.append(SubjectStep(torch.stack([rows[b] for b in range(recordings.rows)])))
    return record(steps)


@check("batch-size", "the policy works with any number of environments")
def batch_size(case: Case) -> str:
    recordings = case.recordings
    if recordings.rows == 1:
        raise NotApplicable("it runs one environment only")
    sizes = [recordings.rows, max(2, recordings.rows - 2), 1, recordings.rows]
    recordings.subject.begin(recordings.rows)
    for i, size in enumerate(sizes):
        if i:
            recordings.subject.change_batch(size)
        try:
            recordings.play_first_rows(size)
        except Exception as error:
            return case.report(
                "batch-size-baked-in",
                f"after {sizes[i - 1] if i else 'no'} environments, a step of {size} ends in {type(error).__name__}: "
                f"{first_line(error)}",
            )
    return f"{', '.join(map(str, sizes))} environments, one after the other"


@check("agents", "agents that share a network do not share its memory")
def agents(case: Case) -> str:
    recordings = case.recordings
    other = recordings.subject.second_agent()
    mine, script = recordings.subject, recordings.script
    mine.begin(recordings.rows)
    other.begin(recordings.rows)
    steps: list[SubjectStep] = []
    for t in range(STEPS):
        steps.append(recordings.step(t, script.obs, recordings.flags_at(t, is_first=t == 0), mine))
        recordings.step(t, script.other_obs, recordings.flags_at(t, "false"), other)
    difference = recordings.compare(record(steps), recordings.rollout().cut(0, STEPS))
    if difference.any:
        case.report(
            "shared-between-agents",
            f"a second agent's steps change the first one's outputs {by_how_much(difference)}",
        )
    return "a second agent's steps do not change the first one's outputs"
