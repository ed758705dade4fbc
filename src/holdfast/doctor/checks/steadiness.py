"""Is it the same policy twice? Noise, batch statistics and moving normalisers, found and then held still."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.checks.base import Case, NotApplicable, check
from holdfast.doctor.exam import Exam
from holdfast.doctor.observations import tensors_in
from holdfast.doctor.script import STEPS
from holdfast.doctor.traces import Gap, Trace, fill


@check("repeatable", "the same data gives the same result")
def repeatable(case: Case) -> str:
    exam = case.exam
    before = _floating_buffers(exam)
    gap = _second_run(exam)
    if gap.any:
        _explain_movement(case, gap, before)
    gap = _second_run(exam, seed_shift=5000)
    if gap.any:
        _explain_noise(case, gap, "rollout leg", lambda: _second_run(exam, seed_shift=5000))
    gap = _second_replay(exam, same_seed=True)
    if gap.any and not _second_replay(exam, same_seed=True, after_the_same_play=True).any:
        case.report(
            "training-moves-memory",
            f"training twice on the same segment differs by {gap.largest:.2g}, unless both follow the same play",
        )
        exam.clear_before_training = True
        exam.forget_recordings()
        return ""
    gap = _second_replay(exam)
    if gap.any:
        _explain_noise(case, gap, "training leg", lambda: _second_replay(exam))
    return "two runs of each leg with different random seeds agree"


def _second_run(exam: Exam, seed_shift: int = 0) -> Gap:
    steps = 2 * STEPS
    return exam.ruler.gap(exam.rollout().cut(0, steps), exam.run(0, steps, seed_shift=seed_shift))


def _second_replay(exam: Exam, same_seed: bool = False, after_the_same_play: bool = False) -> Gap:
    segment = exam.segment(*exam.windows()[1])
    traces = []
    for seed_shift in (100, 100 if same_seed else 200):
        if after_the_same_play:
            exam.run()
        traces.append(exam.replay(segment, seed_shift=seed_shift))
    return exam.ruler.gap(*traces)


@check("training-apart", "training leaves the live memory alone")
def training_apart(case: Case) -> str:
    exam = case.exam
    if not exam.subject.trains_apart:
        raise NotApplicable("its training leg works on the live state, by its form")
    segment, t = exam.segment(*exam.windows()[0]), 6
    exam.subject.begin(exam.rows)
    for step in range(t):
        exam.step(step, exam.script.obs, exam.flags_at(step, True, step == 0))
    exam.replay(segment)
    steps = [exam.step(step, exam.script.obs, exam.flags_at(step, True, False)) for step in range(t, t + 3)]
    gap = exam.ruler.gap(fill(Trace(torch.empty(0), None, None, t), steps), exam.rollout().cut(t, t + 3))
    if gap.any:
        case.report(
            "training-moves-memory", f"after training, the next steps of play differ by up to {gap.largest:.2g}"
        )
    return "play goes on after training as if there had been none"


def _explain_movement(case: Case, gap: Gap, before: list[tuple[str, Tensor, Tensor]]) -> None:
    """The same rollout differs the second time: what moved?"""
    exam, size = case.exam, gap.largest
    if quieten_batch_norm(exam) and not _second_run(exam).any:
        case.report(
            "batch-statistics",
            f"a second run of the same rollout differs by {size:.2g}; with BatchNorm in eval mode it does not",
        )
        return
    carried = {x.data_ptr() for x in tensors_in(exam.subject.state())}
    moved = [
        (name, buffer, float((buffer - old).abs().max()))
        for name, buffer, old in before
        if buffer.data_ptr() not in carried and buffer.shape == old.shape and not torch.equal(buffer, old)
    ]
    if moved:
        name, _, distance = max(moved, key=lambda item: item[2])
        exam.freeze([buffer for _, buffer, _ in moved])
        if not _second_run(exam).any:
            case.report(
                "normaliser-moved",
                f"buffer `{name}` moved by {distance:.2g} while stepping, and a second run of the same rollout differs "
                f"by {size:.2g}; with the buffer frozen it does not",
            )
            return
    case.report("not-repeatable", f"a second run of the same rollout differs by {size:.2g}")


def _explain_noise(case: Case, gap: Gap, leg: str, again: Any) -> None:
    layers = silence_dropout(case.exam)
    if layers and not again().any:
        evidence = (
            f"two runs of the {leg} differ by {gap.largest:.2g}; without dropout ({', '.join(layers)}) they agree"
        )
    else:
        hint = "if sampled actions are among its outputs, pick the others with output="
        evidence = f"two runs of the {leg} on the same data differ by {gap.largest:.2g} ({hint})"
    case.report("random-training-leg", evidence)


def silence_dropout(exam: Exam) -> list[str]:
    """Switches dropout off for the rest of the examination; the names of the layers that had it."""
    silenced: list[str] = []
    for module in exam.subject.modules():
        for name, layer in module.named_modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
                layer.p = 0.0
                silenced.append(name or type(layer).__name__)
            elif isinstance(layer, nn.RNNBase) and layer.dropout > 0:
                layer.dropout = 0.0
                silenced.append(name or type(layer).__name__)
    if silenced:
        exam.forget_recordings()
    return silenced


def quieten_batch_norm(exam: Exam) -> bool:
    """Puts BatchNorm into eval mode for good; False when there is none in training mode."""
    found = False
    for module in exam.subject.modules():
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                found = True
                layer.eval()
                layer.train = _stay.__get__(layer)  # type: ignore[method-assign]
    if found:
        exam.forget_recordings()
    return found


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


def _floating_buffers(exam: Exam) -> list[tuple[str, Tensor, Tensor]]:
    return [
        (name, buffer, buffer.detach().clone())
        for module in exam.subject.modules()
        for name, buffer in module.named_buffers()
    ]
