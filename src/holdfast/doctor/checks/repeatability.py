"""Is it the same policy twice? Noise, batch statistics and moving normalizers are found here, and then held still."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.doctor.checks.base import Case, NotApplicable, check
from holdfast.doctor.comparison import Difference
from holdfast.doctor.recordings import Recordings
from holdfast.doctor.script import STEPS
from holdfast.doctor.trees import tensors_in


@check("repeatable", "the same data gives the same result")
def repeatable(case: Case) -> str:
    recordings = case.recordings
    before = _buffers(recordings)
    difference = _second_run(recordings)
    if difference.any:
        _explain_movement(case, difference, before)
    difference = _second_run(recordings, seed_shift=5000)
    if difference.any:
        _explain_noise(case, difference, "rollout leg", lambda: _second_run(recordings, seed_shift=5000))
    difference = _second_replay(recordings, same_seed=True)
    if difference.any and not _second_replay(recordings, same_seed=True, after_the_same_play=True).any:
        case.report(
            "training-moves-memory",
            f"training twice on the same segment differs by {difference.largest:.2g}, unless the same steps were played "
            "before each",
        )
        recordings.clear_before_training = True
        recordings.forget_recordings()
        return ""
    difference = _second_replay(recordings)
    if difference.any:
        _explain_noise(case, difference, "training leg", lambda: _second_replay(recordings))
    return "two runs of each leg with different random seeds agree"


def _second_run(recordings: Recordings, seed_shift: int = 0) -> Difference:
    steps = 2 * STEPS
    return recordings.compare(recordings.rollout().cut(0, steps), recordings.run(0, steps, seed_shift=seed_shift))


def _second_replay(recordings: Recordings, same_seed: bool = False, after_the_same_play: bool = False) -> Difference:
    segment = recordings.segment(*recordings.windows()[1])
    replays = []
    for seed_shift in (100, 100 if same_seed else 200):
        if after_the_same_play:
            recordings.run()
        replays.append(recordings.replay(segment, seed_shift=seed_shift))
    return recordings.compare(*replays)


@check("training-apart", "training leaves the live memory alone")
def training_apart(case: Case) -> str:
    recordings = case.recordings
    if not recordings.subject.trains_apart:
        raise NotApplicable("its training leg works on the live state by design")
    segment, t = recordings.segment(*recordings.windows()[0]), 6
    recordings.play(0, t)
    recordings.replay(segment)
    after = recordings.play(t, t + 3, begin=False)
    difference = recordings.compare(after, recordings.rollout().cut(t, t + 3))
    if difference.any:
        case.report(
            "training-moves-memory", f"after training, the next rollout steps differ by up to {difference.largest:.2g}"
        )
    return "the rollout continues after training as if there had been none"


def _explain_movement(case: Case, difference: Difference, before: list[tuple[str, Tensor, Tensor]]) -> None:
    """The same rollout differs the second time: report what moved."""
    recordings, size = case.recordings, difference.largest
    if hold_batch_norm(recordings) and not _second_run(recordings).any:
        case.report(
            "batch-statistics",
            f"a second run of the same rollout differs by {size:.2g}; with BatchNorm in eval mode it does not",
        )
        return
    carried = {x.data_ptr() for x in tensors_in(recordings.subject.state())}
    moved = [
        (name, buffer, float((buffer - old).abs().max()))
        for name, buffer, old in before
        if buffer.data_ptr() not in carried and buffer.shape == old.shape and not torch.equal(buffer, old)
    ]
    if moved:
        name, _, distance = max(moved, key=lambda item: item[2])
        recordings.freeze([buffer for _, buffer, _ in moved])
        if not _second_run(recordings).any:
            case.report(
                "normaliser-moved",
                f"buffer `{name}` moved by {distance:.2g} while stepping, and a second run of the same rollout differs "
                f"by {size:.2g}; with the buffer frozen it does not",
            )
            return
    case.report("not-repeatable", f"a second run of the same rollout differs by {size:.2g}")


def _explain_noise(case: Case, difference: Difference, leg: str, again: Callable[[], Difference]) -> None:
    size, layers = difference.largest, silence_dropout(case.recordings)
    if layers and not again().any:
        evidence = f"two runs of the {leg} differ by {size:.2g}; without dropout ({', '.join(layers)}) they agree"
    else:
        hint = "if sampled actions are among its outputs, select the others with output="
        evidence = f"two runs of the {leg} on the same data differ by {size:.2g} ({hint})"
    case.report("random-training-leg", evidence)


def silence_dropout(recordings: Recordings) -> list[str]:
    """Switch dropout off for the rest of the examination. Returns the names of the layers that had it."""
    silenced: list[str] = []
    for module in recordings.subject.modules():
        for name, layer in module.named_modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
                layer.p = 0.0
                silenced.append(name or type(layer).__name__)
            elif isinstance(layer, nn.RNNBase) and layer.dropout > 0:
                layer.dropout = 0.0
                silenced.append(name or type(layer).__name__)
    if silenced:
        recordings.forget_recordings()
    return silenced


def hold_batch_norm(recordings: Recordings) -> bool:
    """Put BatchNorm into eval mode for the rest of the examination. False if there is none."""
    found = False
    for module in recordings.subject.modules():
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                found = True
                layer.eval()
                layer.train = _stay.__get__(layer)  # type: ignore[method-assign]
    if found:
        recordings.forget_recordings()
    return found


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


def _buffers(recordings: Recordings) -> list[tuple[str, Tensor, Tensor]]:
    """(name, buffer, a copy of it) for all modules."""
    return [
        (name, buffer, buffer.detach().clone())
        for module in recordings.subject.modules()
        for name, buffer in module.named_buffers()
    ]
