"""Gradients of the training leg: they flow inside an episode, stop at its start, and the carried state has no graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.doctor.checks.base import CARRIES_ON, Case, NotApplicable, check, place
from holdfast.doctor.credit_probes import (
    Slopes,
    changes_in_rollout,
    differentiable,
    is_recurrent,
    probes,
    score_of,
    slopes,
)
from holdfast.doctor.report.credit import CreditMap
from holdfast.doctor.script import STEPS
from holdfast.doctor.subjects.base import RecordedSegment
from holdfast.state import map_tensors, tensors_in


@check("gradient-flow", "inside an episode, the outcome of a step teaches the steps before it")
def gradient_flow(case: Case) -> str:
    recordings = case.recordings
    first, last = recordings.window
    segment = recordings.segment(first, last)
    severed = _why_nothing_learns(case, segment)
    if severed is not None:
        return case.report("gradients-severed", severed)
    found = _where_credit_arrives(case, segment)
    if found is None:
        return _flow_from_the_start(case, segment)
    number, values = found
    where, recordings.probe = probes(recordings)[number]
    if not bool((values > 0).any()):
        return case.report("gradients-severed", f"no output has a gradient with respect to {where}, at any step")
    recordings.credit = CreditMap(values, recordings.script.resets[first:last].cpu(), first)
    found_here, fits = _fitting_slopes(case, segment, number)
    same = recordings.credit.same_episode
    unseen = (
        same & torch.ones(values.shape[:2], dtype=torch.bool).tril(-1).unsqueeze(2) & (values == 0) & ~found_here.lost
    )
    legs_agree = not recordings.compare(recordings.replayed(first, last), recordings.rollout().cut(first, last)).any
    if number == 0 and bool(unseen.any()) and legs_agree:
        changes = unseen & changes_in_rollout(recordings, first, last)
        found_here = replace(found_here, smooth=found_here.smooth | changes)
    said = _judge_flow(case, found_here, fits, same)
    return said if where == "the observations" else f"{said}, measured at {where}"


def _where_credit_arrives(case: Case, segment: RecordedSegment) -> tuple[int, Tensor] | None:
    """The first place of `probes` with a gradient, and the credit `[T, T, B]` there.

    Without any, the first place behind the observations. None if there is no such place.
    """
    silent = []
    for number, (where, probe) in enumerate(probes(case.recordings)):
        measured = probe(case.recordings, segment, ())
        if measured is None:
            continue
        values = measured.credit()
        if bool((values > 0).any()):
            return number, values
        if where != "the observations":
            silent.append((number, values))
    if "memoryless" in case.earlier:
        raise NotApplicable("it remembers nothing")
    return silent[0] if silent else None


def _fitting_slopes(case: Case, segment: RecordedSegment, first: int) -> tuple[Slopes, bool]:
    """The slopes at the first place where gradients inside a step are right, and whether there is one.

    Where an encoder is frozen or a number is rounded on purpose, gradients before it say nothing about time.
    """
    found = None
    for number, (_, probe) in enumerate(probes(case.recordings)):
        if number < first or probe(case.recordings, segment, ()) is None:
            continue
        here = slopes(case.recordings, number, segment)
        found = found or here
        known, right = (x.diagonal(0, 0, 1) for x in (here.smooth, here.smooth & here.agree))
        if bool((here.credit > 0).any()) and int(right.sum()) >= 0.9 * int(known.sum()):
            return here, True
    assert found is not None
    return found, False


def _flow_from_the_start(case: Case, segment: RecordedSegment) -> str:
    """Where nothing inside a segment can be measured: how long outputs depend on the state that it starts from."""
    nowhere = "no gradient reaches the observations, and no layer behind them has inputs that can be assigned to steps"
    start, leaves = differentiable(segment.start)
    if not leaves:
        raise NotApplicable(nowhere)

    def score_from(start: Any) -> Tensor:
        return score_of(case.recordings.replay_with_graph(segment.with_(marks=(start, *segment.marks[1:]))))

    score = score_from(start)
    same = segment.resets.long().cumsum(0) == 0  # [T, B] still in the episode that the segment starts in
    steps = [t for t in range(len(score)) if bool(same[t].any())]
    reach = -1
    for t in steps:
        found = torch.autograd.grad(score[t][same[t]].sum(), leaves, retain_graph=True, allow_unused=True)
        if any(g is not None and bool((g != 0).any()) for g in found):
            reach = t
    if reach < 0 or len(steps) < 2:
        raise NotApplicable(nowhere)
    moved = score_from(map_tensors(lambda x: x * 1.01 + 0.01 if x.is_floating_point() else x, start))
    changes = same & ((moved - score).abs() > 1e-5 * score.abs().max())
    furthest = max([t for t in steps if bool(changes[t].any())], default=-1)
    said = f"{_reaches(reach)} back in a segment of {len(score)}, measured at the state that it starts from"
    bptt = case.recordings.subject.bptt
    if reach < furthest:
        declared = bptt is not None and reach >= min(bptt - 1, furthest)
        case.report("truncated-bptt" if declared else "over-detached", said)
    return said


def _why_nothing_learns(case: Case, segment: RecordedSegment) -> str | None:
    """Why training gives no parameter a gradient; None if it does. A rollout came before, as in a real run."""
    recordings = case.recordings
    parameters = [p for m in recordings.subject.modules() for p in m.parameters() if p.requires_grad]
    if not parameters:
        return None
    score = score_of(recordings.replay_with_graph(segment))
    if not score.requires_grad:
        return "the outputs of the training leg have no graph"
    gradients = torch.autograd.grad(score.sum(), parameters, allow_unused=True)
    alive = {
        p for p, g in zip(parameters, gradients) if g is not None and bool(g.isfinite().all()) and bool((g != 0).any())
    }
    if not alive:
        return f"none of {len(parameters)} parameters gets a finite, non-zero gradient"
    layers = [layer for m in recordings.subject.modules() for layer in m.modules() if is_recurrent(layer)]
    recurrent = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    if recurrent and not alive.intersection(recurrent) and "memoryless" not in case.earlier:
        names = " and ".join(dict.fromkeys(type(layer).__name__ for layer in layers))
        return f"no parameter of its {names} gets a gradient; others do"
    return None


def _judge_flow(case: Case, found: Slopes, fits: bool, same: Tensor) -> str:
    """Compare gradients with what really happens if a step changes, lag by lag. A zero is a fault only if it should not be.

    A cut after every `bptt` steps, if declared, leaves credit for `bptt - 1` steps back. `fits`: gradients are right
    inside a step, so that their sign and size through time can be judged.
    """
    bptt = case.recordings.subject.bptt
    lost, alive = same & found.lost, same & (found.credit > 0)
    lags = range(1, len(same))
    missing, present = ([int(x.diagonal(-lag, 0, 1).sum()) for lag in lags] for x in (lost, alive))
    total, longest = (
        sum(missing) + sum(present),
        max([lag for lag, *n in zip(lags, missing, present) if any(n)], default=0),
    )
    reach = max([lag for lag, n, m in zip(lags, present, missing) if n > 0.1 * (n + m)], default=0)
    if total and (sum(missing) > 0.2 * total or reach < longest):
        as_declared = bptt is not None and reach >= min(bptt - 1, longest)
        declared = f"; bptt={bptt} is declared" if bptt is not None else ""
        case.report(
            "truncated-bptt" if as_declared else "over-detached",
            f"{sum(missing)} of {total} pairs of steps inside one episode have a gradient of exactly 0, though the later "
            f"output changes with the earlier step; in a segment of {len(same)} steps {_reaches(reach)} back{declared}",
        )
    elif fits:
        _judge_sizes(case, found, alive)
    return f"{_reaches(reach)} back in a segment of {len(same)}"


def _judge_sizes(case: Case, found: Slopes, alive: Tensor) -> None:
    """Signs and sizes of gradients from one step to a later one."""
    known = alive & found.smooth & torch.ones(alive.shape[:2], dtype=torch.bool).tril(-1).unsqueeze(2)
    wrong = known & ~found.agree
    if int(known.sum()) < 5 or int(wrong.sum()) <= 0.2 * int(known.sum()):
        return
    t, s, row = wrong.nonzero()[0].tolist()
    case.report(
        "gradient-distorted",
        f"{int(wrong.sum())} of {int(known.sum())} gradients from one step to an earlier one differ from what a small change "
        f"of the earlier step does; from step {t} to step {s} of a segment, env {row}, the gradient says "
        f"{float(found.by_gradient[t, s, row]):.2g} and the change {float(found.by_difference[t, s, row]):.2g}",
    )


def _reaches(reach: int) -> str:
    return f"credit reaches {reach} step{'' if reach == 1 else 's'}"


@check("gradient-isolation", "no gradient crosses an episode's start, or goes from one environment to another")
def gradient_isolation(case: Case) -> str:
    recordings = case.recordings
    if recordings.subject.carries_across_episodes:
        raise NotApplicable(CARRIES_ON)
    if recordings.credit is None:
        raise NotApplicable("there is no credit map: no gradient reaches the observations")
    values, first = recordings.credit.values, recordings.credit.first
    forbidden = ~recordings.credit.same_episode
    leak = torch.where(forbidden, values, torch.zeros_like(values))
    floor = 1e-9 * float(values.max())
    if bool((leak > floor).any()):
        t, s, row = (leak == leak.max()).nonzero()[0].tolist()
        return case.report(
            "sees-the-future" if s > t else "gradient-crosses-reset",
            f"the output at {place(first + t, row)} has a gradient of {float(leak.max()):.2g} with respect to the "
            f"observation at t={first + s}, {'which comes later' if s > t else 'in an earlier episode'}",
        )
    return _start_state_and_rows(case, floor)


def _start_state_and_rows(case: Case, floor: float) -> str:
    recordings = case.recordings
    first, last = recordings.window
    segment = recordings.segment(first, last)
    start, leaves = differentiable(segment.start)
    assert recordings.probe is not None
    measured = recordings.probe(recordings, segment.with_(marks=(start, *segment.marks[1:])), ())
    assert measured is not None
    score = measured.score
    after = recordings.script.resets[first:last].cpu().long().cumsum(0) > 0  # [T, B] past the first episode start
    if leaves and bool(after.any()):
        for gradient in torch.autograd.grad(
            score[after.to(score.device)].sum(), leaves, retain_graph=True, allow_unused=True
        ):
            if gradient is not None and float(gradient.abs().max()) > floor:
                return case.report(
                    "gradient-crosses-reset",
                    f"steps after an episode's start have a gradient of {float(gradient.abs().max()):.2g} with respect "
                    "to the start state of the segment",
                )
    row = recordings.rows // 2
    others = [b for b in range(recordings.rows) if b != row]
    for gradient in measured.gradients(score[:, row].sum()) if others else ():
        if float(gradient[:, others].abs().max()) > floor:
            return case.report(
                "wrong-environment", f"the outputs of env {row} have a gradient with respect to other environments"
            )
    return "every gradient across an episode's start is 0"


@check("bounded-graph", "the carried state holds no graph")
def bounded_graph(case: Case) -> str:
    recordings = case.recordings
    try:
        return _live_segments(case) or _epochs(case)
    except RuntimeError as error:
        if "second time" not in str(error) and "inplace operation" not in str(error):
            raise
        return case.report(
            "graph-kept", f"the next segment's backward pass ends in: {str(error).splitlines()[0].split('. ')[0]}"
        )
    finally:
        for module in recordings.subject.modules():
            module.zero_grad(set_to_none=True)


def _live_segments(case: Case) -> str:
    """Two segments of live steps, each followed by a backward pass if the steps have a graph.

    A state that is detached when it is read holds the graph of one step, which is no harm. Reported is a graph that
    reaches from one segment into the one before.
    """
    recordings, subject = case.recordings, case.recordings.subject
    subject.begin(recordings.rows)
    before: set[Any] = set()
    for segment in range(2):
        scores = []
        if segment:
            subject.begin_rollout()
        for t in range(segment * STEPS, segment * STEPS + STEPS):
            flags = recordings.flags_at(t, is_first=t == 0)
            with torch.enable_grad():
                scores.append(recordings.step(t, recordings.script.obs, flags, live=True).output)
            if t == STEPS and before & _graph(tensors_in(subject.state())):
                case.report(
                    "graph-kept",
                    f"in the first step of a segment the carried state has a graph that reaches into the segment before it, "
                    f"which had {len(before)} operations",
                )
                return " "
        before = _graph(tensors_in(subject.state()))
        subject.end_segment()
        live = [score for score in scores if score.requires_grad]
        if live:
            torch.stack(live).sum().backward()
    return ""


def _epochs(case: Case) -> str:
    """Several epochs over the same segments."""
    recordings = case.recordings
    for window in (*recordings.windows()[:2], *recordings.windows()[:2]):
        score = score_of(recordings.replay_with_graph(recordings.segment(*window)))
        if score.requires_grad:
            score.sum().backward()
    held = _graph(tensors_in(recordings.rollout().marks))
    if held:
        case.report("graph-kept", f"the stored start states hold a graph of {len(held)} operations")
    return f"{2 * STEPS} steps and 4 backward passes leave no graph behind"


def _graph(tensors: list[Tensor], limit: int = 20_000) -> set[Any]:
    """The operations that can be reached from these tensors, up to a limit; without parameters."""
    todo: list[Any] = [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen = set(todo)
    while todo and len(seen) < limit:
        for parent, _ in todo.pop().next_functions:
            if parent is not None and parent not in seen and parent.next_functions:
                seen.add(parent)
                todo.append(parent)
    return seen
