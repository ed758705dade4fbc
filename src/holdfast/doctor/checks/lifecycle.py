"""The rest of a policy's life: bootstrap values, evaluation, resets, checkpoints, types, long episodes, compiling."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from holdfast.doctor import hypotheses
from holdfast.doctor.checks.base import Case, NotApplicable, check, place
from holdfast.doctor.checks.identity import _short, _steps_with
from holdfast.doctor.exam import Exam, state_norms
from holdfast.doctor.observations import map_tensors, tensors_in
from holdfast.doctor.script import TOTAL
from holdfast.doctor.traces import Trace, fill, to_numbers

LONG = 110
LARGE = 50.0


@check("bootstrap", "the value of a final observation uses the memory at hand and leaves it alone")
def bootstrap(case: Case) -> str:
    exam, subject = case.exam, case.exam.subject
    t = 7
    _play(exam, 0, t)
    everyone = torch.arange(exam.rows)
    obs = map_tensors(lambda x: x[t], exam.script.obs)
    peeked = to_numbers(subject.peek_value(obs, everyone))
    few = torch.tensor([exam.rows - 1, 0][: exam.rows])
    try:
        some = to_numbers(subject.peek_value(map_tensors(lambda x: x[few.to(x.device)], obs), few))
    except Exception as error:
        case.report(
            "batch-size-baked-in",
            f"a bootstrap value for {len(few)} of {exam.rows} environments ends in: {_short(error)}",
        )
        return ""
    none = torch.zeros_like(exam.script.terminated[0])
    acted = exam.step(t, exam.script.obs, (none, none))
    value = to_numbers(acted.output)[:, subject.value_column()]
    allow = float(exam.ruler.output[subject.value_column()])
    if float((peeked - value).abs().max()) > allow:
        fresh = exam.alone(torch.ones_like(exam.true_resets), t, t + 1).output[0, :, subject.value_column()]
        cleared = float((peeked - fresh).abs().max()) <= allow
        story = "they are those of an empty memory" if cleared else "they belong to some other state"
        moved = _moves_memory(exam, t, obs, everyone)
        if moved is not None and not cleared:
            case.report("bootstrap-moves-memory", moved)
        else:
            gap = float((peeked - value).abs().max())
            case.report(
                "bootstrap-after-reset",
                f"bootstrap values differ by up to {gap:.2g} from those of a step on the same observations; {story}",
            )
        return ""
    if float((some - peeked[few]).abs().max()) > allow:
        case.report(
            "wrong-environment", f"bootstrap values of env {few.tolist()} differ from theirs among all environments"
        )
        return ""
    moved = _moves_memory(exam, t, obs, everyone)
    if moved is not None:
        case.report("bootstrap-moves-memory", moved)
    return "bootstrap values equal those of a step, for all and for some environments, and memory stays"


def _moves_memory(exam: Exam, t: int, obs: Any, ids: Tensor) -> str | None:
    _play(exam, 0, t)
    exam.subject.peek_value(obs, ids)
    after = _play(exam, t, t + 3, begin=False)
    gap = exam.ruler.gap(after, exam.rollout().cut(t, t + 3))
    return f"after asking for a value, the next steps differ by up to {gap.largest:.2g}" if gap.any else None


def _play(exam: Exam, first: int, last: int, begin: bool = True) -> Trace:
    """Steps of the script with its flags, going on from wherever the subject is."""
    if begin:
        exam.subject.begin(exam.rows)
    steps = [exam.step(t, exam.script.obs, exam.flags_at(t, True, begin and t == first)) for t in range(first, last)]
    return fill(Trace(torch.empty(0), None, None, first), steps)


@check("evaluation", "play and evaluation handle memory as the training rollout does")
def evaluation(case: Case) -> str:
    exam = case.exam
    played = exam.run(subject=exam.subject.evaluation())
    gap = exam.ruler.gap(played, exam.rollout())
    if not gap.any:
        return f"evaluation gives what the rollout gives (largest difference {gap.largest:.1g})"
    names = {"never-resets": "eval-never-resets", "memoryless": "eval-memoryless"}
    step, row = gap.first_place()
    evidence = f"evaluation differs from the rollout by up to {gap.largest:.2g}, first at {place(step, row)}"
    for guess in hypotheses.of_a_rollout(exam.script):
        if not exam.ruler.gap(played, exam.alone(guess.resets)).any:
            case.report(names.get(guess.causes[0], guess.causes[0]), f"{evidence}; it is explained by: {guess.story}")
            return ""
    case.report("eval-differs", evidence)
    return ""


@check("reset-call", "a call to forget makes it forget")
def reset_call(case: Case) -> str:
    exam = case.exam
    t = 5
    _play(exam, 0, t)
    exam.subject.reset_memory()
    none = torch.zeros_like(exam.script.terminated[0])
    steps = [exam.step(t + i, exam.script.obs, (none, none)) for i in range(3)]
    after = fill(Trace(torch.empty(0), None, None, t), steps)
    fresh = torch.zeros_like(exam.true_resets)
    fresh[t] = True
    gap = exam.ruler.gap(after, exam.alone(fresh, t, t + 3))
    if gap.any:
        case.report(
            "reset-does-nothing",
            f"after {t} steps and a reset call, the next step differs from a first step by {gap.largest:.2g}",
        )
    return "the step after a reset call equals a first step"


@check("checkpoint", "weights are saved without memory, and memory survives where it is saved")
def checkpoint(case: Case) -> str:
    exam = case.exam
    modules = exam.subject.modules()
    if not modules:
        raise NotApplicable("it shows no torch module")
    shapes = []
    sizes = [exam.rows, max(1, exam.rows - 2)]
    for size in sizes:
        exam.subject.begin(size)
        try:
            _steps_with(exam, size)
        except Exception:
            break  # the batch-size check tells of it
        shapes.append(
            {
                key: tuple(value.shape)
                for m in modules
                for key, value in m.state_dict().items()
                if isinstance(value, Tensor)
            }
        )
    carried = {x.data_ptr() for x in tensors_in(exam.subject.state()) if x.numel()}
    alias = [k for m in modules for k, v in m.state_dict().items() if isinstance(v, Tensor) and v.data_ptr() in carried]
    moving = [key for key in shapes[0] if len(shapes) > 1 and shapes[1].get(key) != shapes[0][key]] if shapes else []
    if alias or moving:
        key = (moving or alias)[0]
        detail = (
            f" has shape {shapes[0][key]} with {sizes[0]} environments and {shapes[1].get(key)} with {sizes[1]}"
            if moving
            else " is the live state"
        )
        case.report("memory-in-state-dict", f"the entry `{key}` of state_dict(){detail}")
        return ""
    return _resume(case)


def _resume(case: Case) -> str:
    exam = case.exam
    t = 8
    _play(exam, 0, t)
    try:
        saved = copy.deepcopy(exam.subject.save())
    except Exception as error:
        return f"state_dict() holds weights only; continuing was not tried: {_short(error)}"
    _play(exam, 0, 3)
    exam.subject.begin(exam.rows)
    exam.subject.load(saved)
    gap = exam.ruler.gap(_play(exam, t, t + 4, begin=False), exam.rollout().cut(t, t + 4))
    if gap.any:
        case.report(
            "memory-lost-on-resume", f"continued from a checkpoint of t={t}, outputs differ by up to {gap.largest:.2g}"
        )
    return "state_dict() holds weights only, and a run continues from its checkpoint"


@check("initial-state", "the first state can be trained through, and has the type of the weights")
def initial_state(case: Case) -> str:
    exam = case.exam
    exam.subject.begin(exam.rows)
    stored = [*tensors_in(exam.subject.state()), *tensors_in(exam.rollout().marks)]
    if any(x.is_inference() for x in stored):
        case.report("inference-tensor-state", "the state was made under torch.inference_mode()")
        return ""
    if not exam.subject.makes_own_state or not exam.subject.modules():
        raise NotApplicable("its first state is made by the caller")
    double = exam.subject.isolated()
    for module in double.modules():
        module.double()
    obs = map_tensors(lambda x: x.double() if x.is_floating_point() else x, exam.script.obs)
    double.begin(exam.rows)
    try:
        for t in range(2):
            exam.step(t, obs, exam.flags_at(t, True, t == 0), double)
    except (RuntimeError, TypeError, ValueError) as error:
        case.report("dtype-baked-in", f"after .double(), a step ends in: {_short(error)}")
    return "it is trainable, and follows .double()"


@check("state-growth", "the state stays within bounds in a long episode")
def state_growth(case: Case) -> str:
    exam = case.exam
    none = torch.zeros_like(exam.script.terminated[0])
    exam.subject.begin(exam.rows)
    norms = []
    for t in range(LONG):
        exam.step(t % TOTAL, exam.script.obs, (none, none))
        if t in (TOTAL, LONG - 1):
            norms.append(state_norms(exam.subject, exam.rows))
    if bool(norms[0].isnan().any()):
        raise NotApplicable("it does not show its state")
    largest = max(
        float(x.detach().abs().max()) for x in tensors_in(exam.subject.state()) if x.is_floating_point() and x.numel()
    )
    growth = float((norms[1] / norms[0].clamp(min=1e-12)).max())
    if largest > LARGE and growth > 1.5:
        case.report(
            "state-grows",
            f"the largest number in the state is {largest:.3g} after {LONG} steps, {growth:.1f} times the "
            f"size after {TOTAL}",
        )
    return f"after {LONG} steps the largest number in the state is {largest:.2g}"


@check("compile", "torch.compile takes the training leg as one graph", extra=True)
def compiles(case: Case) -> str:
    from torch._dynamo.utils import counters

    exam = case.exam
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(exam.subject.training_call, backend="eager")
    try:
        compiled(exam.segment(*exam.windows()[1]))
        graphs = counters["stats"]["unique_graphs"]
        compiled(exam.segment(*exam.windows()[2]))
        again = counters["stats"]["unique_graphs"] - graphs
        breaks = [str(reason).splitlines()[0][:100] for reason in counters["graph_break"]]
    finally:
        torch._dynamo.reset()
    if breaks:
        case.report("graph-breaks", f"{graphs} graphs instead of one: {'; '.join(sorted(set(breaks))[:3])}")
    elif again:
        case.report("graph-breaks", "it is compiled anew when episodes end elsewhere")
    return f"{graphs} graph{'' if graphs == 1 else 's'}, no break, and no new one when episodes end elsewhere"
