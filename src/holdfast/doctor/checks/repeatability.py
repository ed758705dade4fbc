"""Is it the same policy twice? Noise, batch statistics and moving normalizers are found here, and then held still."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from holdfast.doctor.checks.base import Case, NotApplicable, check
from holdfast.doctor.comparison import Difference
from holdfast.doctor.recordings import MovingPart, Recordings
from holdfast.doctor.script import STEPS
from holdfast.state import tensors_in

OTHER_SEED = 5000


@check("repeatable", "the same data gives the same result")
def repeatable(case: Case) -> str:
    recordings = case.recordings
    _leg_repeats(case, "rollout", lambda shift: _second_run(recordings, shift))
    difference = _second_replay(recordings, 0)
    if difference.any and not _second_replay(recordings, 0, after_the_same_play=True).any:
        case.report(
            "training-moves-memory",
            f"training twice on the same segment differs by {difference.largest:.2g}, unless the same steps were played "
            "before each",
        )
        recordings.clear_before_training = True
        recordings.forget_recordings()
        return ""
    _leg_repeats(case, "training leg", lambda shift: _second_replay(recordings, shift))
    return "two runs of each leg with different random seeds agree"


#: runs a leg twice, the second time with another seed if the argument is not 0
Again = Callable[[int], Difference]


def _leg_repeats(case: Case, leg: str, again: Again) -> None:
    """With the same random numbers a difference is something that moved, with other random numbers it is noise."""
    difference = again(0)
    if difference.any:
        _explain_movement(case, leg, difference, again)
        return
    difference = again(OTHER_SEED)
    if difference.any:
        _explain_noise(case, leg, difference, again)


def _second_run(recordings: Recordings, seed_shift: int) -> Difference:
    steps = 2 * STEPS
    return recordings.compare(recordings.rollout().cut(0, steps), recordings.run(0, steps, seed_shift=seed_shift))


def _second_replay(recordings: Recordings, seed_shift: int, after_the_same_play: bool = False) -> Difference:
    segment = recordings.segment(*recordings.window)
    replays = []
    for shift in (100, 100 + seed_shift):
        if after_the_same_play:
            recordings.run()
        replays.append(recordings.replay(segment, seed_shift=shift))
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


def _explain_movement(case: Case, leg: str, difference: Difference, again: Again) -> None:
    """The same leg on the same data differs the second time: report what moved."""
    recordings, size = case.recordings, difference.largest
    if hold_batch_norm(recordings) and not again(0).any:
        case.report(
            "batch-statistics",
            f"a second run of the same {leg} differs by {size:.2g}; with BatchNorm in eval mode it does not",
            removed=True,
        )
        return
    carried = {x.data_ptr() for x in tensors_in(recordings.subject.state())}
    moved = [part for part in recordings.parts if part.moved() and part.address() not in carried]
    buffers = [part for part in moved if part.is_buffer]
    if buffers:
        largest = max(buffers, key=MovingPart.distance)
        distance = largest.distance()
        recordings.freeze([part.now() for part in buffers])
        if not again(0).any:
            case.report(
                "normaliser-moved",
                f"buffer `{largest.name}` moved by {distance:.2g}, and a second run of the same "
                f"{leg} differs by {size:.2g}; with the buffer frozen it does not",
            )
            return
    names = ", ".join(f"`{part.name}`" for part in moved[:3])
    what = f"; {names} changed meanwhile" if names else ""
    case.report(
        "not-repeatable", f"a second run of the same {leg} with the same random numbers differs by {size:.2g}{what}"
    )


def _explain_noise(case: Case, leg: str, difference: Difference, again: Again) -> None:
    size, layers = difference.largest, silence_dropout(case.recordings)
    if layers and not again(OTHER_SEED).any:
        case.report(
            "random-training-leg",
            f"two runs of the {leg} differ by {size:.2g}; without dropout ({', '.join(layers)}) they agree",
            removed=True,
        )
        return
    hint = "if sampled actions are among its outputs, select the others with output="
    case.report("random-training-leg", f"two runs of the {leg} on the same data differ by {size:.2g} ({hint})")


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
