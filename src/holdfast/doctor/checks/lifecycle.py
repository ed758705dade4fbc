"""Around the two legs: bootstrap values, evaluation, reset calls, checkpoints, dtypes, long episodes, torch.compile."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from holdfast.doctor import hypotheses
from holdfast.doctor.checks.base import Case, NotApplicable, by_how_much, check, first_line
from holdfast.doctor.comparison import record, to_numbers
from holdfast.doctor.recordings import Recordings, state_norms
from holdfast.doctor.script import TOTAL
from holdfast.state import map_tensors, tensors_in

LONG_EPISODE = 110  # steps
LARGE = 50.0  # for a number in a state


@check("bootstrap", "the value of a final observation uses the current memory and does not change it")
def bootstrap(case: Case) -> str:
    recordings, subject = case.recordings, case.recordings.subject
    t = 7
    recordings.play(0, t)
    everyone = torch.arange(recordings.rows)
    obs = map_tensors(lambda x: x[t], recordings.script.obs)
    peeked = to_numbers(subject.peek_value(obs, everyone))
    few = torch.tensor([recordings.rows - 1, 0][: recordings.rows])
    try:
        some = to_numbers(subject.peek_value(map_tensors(lambda x: x[few.to(x.device)], obs), few))
    except Exception as error:
        return case.report(
            "batch-size-baked-in",
            f"a bootstrap value for {len(few)} of {recordings.rows} environments ends in: {first_line(error)}",
        )
    none = torch.zeros_like(recordings.script.terminated[0])
    acted = recordings.step(t, recordings.script.obs, (none, none))
    value = to_numbers(acted.output)[:, subject.value_column()]
    allow = float(recordings.tolerances.output[subject.value_column()])
    off = float((peeked - value).abs().max())
    if off > allow:
        before = recordings.rollout().output[t - 1, :, subject.value_column()]
        if float((peeked - before).abs().max()) <= allow:
            return case.report(
                "bootstrap-of-another-step",
                f"asked for the value of an observation after t={t - 1}, it gives that of t={t - 1}; they differ by up to "
                f"{off:.2g}",
            )
        fresh = recordings.alone(torch.ones_like(recordings.true_resets), t, t + 1).output[0, :, subject.value_column()]
        cleared = float((peeked - fresh).abs().max()) <= allow
        whose = "they are those of an empty memory" if cleared else "they belong to some other state"
        moved = _moves_memory(recordings, t, obs, everyone)
        if moved is not None and not cleared:
            return case.report("bootstrap-moves-memory", moved)
        return case.report(
            "bootstrap-after-reset",
            f"bootstrap values differ by up to {off:.2g} from those of a step on the same observations; {whose}",
        )
    if float((some - peeked[few]).abs().max()) > allow:
        return case.report(
            "wrong-environment",
            f"bootstrap values of env {few.tolist()} alone differ from those of the same environments among all",
        )
    moved = _moves_memory(recordings, t, obs, everyone)
    if moved is not None:
        case.report("bootstrap-moves-memory", moved)
    return "bootstrap values equal those of a step, for all and for some environments, and memory does not change"


def _moves_memory(recordings: Recordings, t: int, obs: Any, ids: Tensor) -> str | None:
    recordings.play(0, t)
    recordings.subject.peek_value(obs, ids)
    after = recordings.play(t, t + 3, begin=False)
    difference = recordings.compare(after, recordings.rollout().cut(t, t + 3))
    return (
        f"after asking for a value, the next steps differ by up to {difference.largest:.2g}" if difference.any else None
    )


@check("evaluation", "play and evaluation handle memory as the training rollout does")
def evaluation(case: Case) -> str:
    recordings = case.recordings
    played = recordings.run(subject=recordings.subject.evaluation())
    difference = recordings.compare(played, recordings.rollout())
    if not difference.any:
        return f"evaluation gives what the rollout gives (largest difference {difference.largest:.1g})"
    if not recordings.compare(played, recordings.alone(recordings.true_resets)).any:
        return "evaluation resets correctly, the rollout does not"
    names = {"never-resets": "eval-never-resets", "memoryless": "eval-memoryless"}
    evidence = f"evaluation differs from the rollout {by_how_much(difference)}"
    for guess in hypotheses.of_a_rollout(recordings.script):
        if not recordings.compare(played, recordings.alone(guess.resets)).any:
            return case.report(
                names.get(guess.causes[0], guess.causes[0]), f"{evidence}; it is explained by: {guess.story}"
            )
    return case.report("eval-differs", evidence)


@check("reset-call", "a reset call resets the memory")
def reset_call(case: Case) -> str:
    recordings = case.recordings
    t = 5
    recordings.play(0, t)
    recordings.subject.reset_memory()
    none = torch.zeros_like(recordings.script.terminated[0])
    after = record([recordings.step(t + i, recordings.script.obs, (none, none)) for i in range(3)], t)
    fresh = torch.zeros_like(recordings.true_resets)
    fresh[t] = True
    difference = recordings.compare(after, recordings.alone(fresh, t, t + 3))
    if difference.any:
        case.report(
            "reset-does-nothing",
            f"after {t} steps and a reset call, the next step differs from a first step by {difference.largest:.2g}",
        )
    return "the step after a reset call equals a first step"


@check("checkpoint", "weights are saved without memory, and memory survives where it is saved")
def checkpoint(case: Case) -> str:
    recordings = case.recordings
    modules = recordings.subject.modules()
    if not modules:
        raise NotApplicable("it has no torch module")
    shapes = []
    sizes = [recordings.rows, max(1, recordings.rows - 2)]
    for size in sizes:
        recordings.subject.begin(size)
        try:
            recordings.play_first_rows(size)
        except Exception:
            break  # the batch-size check reports it
        shapes.append(
            {
                key: tuple(value.shape)
                for m in modules
                for key, value in m.state_dict().items()
                if isinstance(value, Tensor)
            }
        )
    carried = {x.data_ptr() for x in tensors_in(recordings.subject.state()) if x.numel()}
    alias = [k for m in modules for k, v in m.state_dict().items() if isinstance(v, Tensor) and v.data_ptr() in carried]
    moving = [key for key in shapes[0] if len(shapes) > 1 and shapes[1].get(key) != shapes[0][key]] if shapes else []
    if alias or moving:
        key = (moving or alias)[0]
        detail = (
            f" has shape {shapes[0][key]} with {sizes[0]} environments and {shapes[1].get(key)} with {sizes[1]}"
            if moving
            else " is the live state"
        )
        return case.report("memory-in-state-dict", f"the entry `{key}` of state_dict(){detail}")
    return _resume(case)


def _resume(case: Case) -> str:
    recordings = case.recordings
    t = 8
    recordings.play(0, t)
    try:
        saved = copy.deepcopy(recordings.subject.save())
    except Exception as error:
        return f"state_dict() holds weights only; resuming was not tried: {first_line(error)}"
    recordings.play(0, 3)
    recordings.subject.begin(recordings.rows)
    recordings.subject.load(saved)
    difference = recordings.compare(recordings.play(t, t + 4, begin=False), recordings.rollout().cut(t, t + 4))
    if difference.any:
        case.report(
            "memory-lost-on-resume",
            f"resumed from a checkpoint of t={t}, outputs differ by up to {difference.largest:.2g}",
        )
    return "state_dict() holds weights only, and a run resumes from its checkpoint"


@check("initial-state", "the first state can be trained through, and has the type of the weights")
def initial_state(case: Case) -> str:
    recordings = case.recordings
    recordings.subject.begin(recordings.rows)
    stored = [*tensors_in(recordings.subject.state()), *tensors_in(recordings.rollout().marks)]
    if any(x.is_inference() for x in stored):
        return case.report("inference-tensor-state", "the state was made under torch.inference_mode()")
    if not recordings.subject.makes_own_state or not recordings.subject.modules():
        raise NotApplicable("its first state is made by the caller")
    double = recordings.subject.isolated()
    for module in double.modules():
        module.double()
    obs = map_tensors(lambda x: x.double() if x.is_floating_point() else x, recordings.script.obs)
    double.begin(recordings.rows)
    try:
        for t in range(2):
            recordings.step(t, obs, recordings.flags_at(t, is_first=t == 0), double)
    except (RuntimeError, TypeError, ValueError) as error:
        case.report("dtype-baked-in", f"after .double(), a step ends in: {first_line(error)}")
    return "it is trainable, and follows .double()"


@check("state-growth", "the state stays within bounds in a long episode")
def state_growth(case: Case) -> str:
    recordings = case.recordings
    none = torch.zeros_like(recordings.script.terminated[0])
    recordings.subject.begin(recordings.rows)
    norms = []
    for t in range(LONG_EPISODE):
        recordings.step(t % TOTAL, recordings.script.obs, (none, none))
        if t == 0 and bool(state_norms(recordings.subject, recordings.rows).isnan().all()):
            raise NotApplicable("it does not expose its state")
        if t in (TOTAL, LONG_EPISODE - 1):
            norms.append(state_norms(recordings.subject, recordings.rows))
    if bool(norms[0].isnan().any()):
        raise NotApplicable("it does not expose its state")
    largest = max(
        float(x.detach().abs().max())
        for x in tensors_in(recordings.subject.state())
        if x.is_floating_point() and x.numel()
    )
    growth = float((norms[1] / norms[0].clamp(min=1e-12)).max())
    if largest > LARGE and growth > 1.5:
        case.report(
            "state-grows",
            f"the largest number in the state is {largest:.3g} after {LONG_EPISODE} steps, {growth:.1f} "
            f"times its size after {TOTAL}",
        )
    return f"after {LONG_EPISODE} steps the largest number in the state is {largest:.2g}"


@check("compile", "torch.compile compiles the training leg as one graph", extra=True)
def compiles(case: Case) -> str:
    from torch._dynamo.utils import counters

    recordings = case.recordings
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(recordings.subject.training_call, backend="eager")
    try:
        compiled(recordings.segment(*recordings.window))
        graphs = counters["stats"]["unique_graphs"]
        compiled(recordings.segment(*recordings.windows()[-1]))
        again = counters["stats"]["unique_graphs"] - graphs
        breaks = [str(reason).splitlines()[0][:100] for reason in counters["graph_break"]]
    finally:
        torch._dynamo.reset()
    if breaks:
        case.report("graph-breaks", f"{graphs} graphs instead of one: {'; '.join(sorted(set(breaks))[:3])}")
    elif again:
        case.report("graph-breaks", "it is recompiled when episodes end at other steps")
    return (
        f"{graphs} graph{'' if graphs == 1 else 's'}, no break, and no recompilation when episodes end at other steps"
    )
