"""The training leg: does running a stored segment again give what the rollout gave?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.doctor import hypotheses
from holdfast.doctor.checks.base import Case, by_how_much, check
from holdfast.doctor.comparison import Difference, Recording, record, record_replay, to_numbers
from holdfast.doctor.recordings import Recordings
from holdfast.doctor.script import STEPS
from holdfast.doctor.subjects.base import NotOffered
from holdfast.state import tensors_in

#: causes of a wrong start state, and the earlier findings that they may follow from
STARTS = frozenset({"starts-from-zeros", "wrong-start-state", "late-by-one"})
MOVES_STARTS = frozenset({"training-moves-memory", "wrong-environment", "layout-swapped", "index-not-mask"})


@check("replay", "training on unchanged weights gives what the rollout gave")
def replay(case: Case) -> str:
    recordings = case.recordings
    rollout = recordings.rollout()
    differences = {w: recordings.compare(recordings.replayed(*w), rollout.cut(*w)) for w in recordings.windows()}
    right = recordings.rollout_resets is not None and torch.equal(recordings.rollout_resets, recordings.true_resets)
    if not any(difference.any for difference in differences.values()):
        largest = max(difference.largest for difference in differences.values())
        agree = f"{len(differences)} segments agree with the rollout{'' if right else ', with the same mistakes'}"
        return f"{agree} (largest difference {largest:.1g})"
    window, difference = next((w, g) for w, g in differences.items() if g.any)
    evidence = _ratio(recordings, window, difference)
    if recordings.rollout_resets is None:
        for cause, story in _as_the_rollout_would(recordings):
            return case.report(cause, f"{evidence}; all segments are explained by: {story}", explained=True)
        return case.report("legs-differ", f"{evidence}; the rollout leg itself follows no rule", because_of="any")
    if not right and _follows(recordings, recordings.rollout_resets, recordings.true_resets):
        return case.report(
            "legs-differ", f"{evidence}: training resets correctly, the rollout does not", because_of="any"
        )
    if recordings.subject.carries_across_episodes and _follows(
        recordings, recordings.rollout_resets, recordings.script.resets
    ):
        return case.report(
            "legs-differ", f"{evidence}: the rollout carries memory on, as declared, and training clears it"
        )
    explained = _explanation(recordings)
    if explained is not None:
        causes, story = explained
        for cause in causes:
            same = cause in case.earlier or (cause == "reset-dropped-in-training" and "never-resets" in case.earlier)
            because_of = ("never-resets" if cause not in case.earlier else cause) if same else None
            own = not case.earlier & MOVES_STARTS if cause in STARTS else "layout-swapped" not in case.earlier
            case.report(cause, f"{evidence}; all segments are explained by: {story}", because_of, explained=own)
        return ""
    cause, story = _unexplained(recordings, differences)
    return case.report(cause, f"{evidence}; {story}")


def _follows(recordings: Recordings, before: Tensor, resets: Tensor) -> bool:
    """Whether training equals the episodes played alone, if it follows `resets` from states that followed `before`."""
    for first, last in recordings.windows():
        pattern = before.clone()
        pattern[first:last] = resets[first:last]
        if recordings.compare(recordings.replayed(first, last), recordings.alone(pattern, first, last)).any:
            return False
    return True


def _explanation(recordings: Recordings) -> tuple[tuple[str, ...], str] | None:
    """The mistakes that give what training gave in every segment, and what they are; None if none do."""
    assert recordings.rollout_resets is not None
    by_window = [
        hypotheses.of_training(recordings.script, recordings.rollout_resets, *w, recordings.fresh_rollouts)
        for w in recordings.windows()
    ]
    for guesses in zip(*by_window):
        if all(
            not recordings.compare(recordings.replayed(*w), recordings.alone(guess.resets, *w)).any
            for w, guess in zip(recordings.windows(), guesses)
        ):
            return guesses[0].causes, guesses[0].story
    return _wrong_start(recordings)


def _as_the_rollout_would(recordings: Recordings) -> list[tuple[str, str]]:
    """For a rollout that resets by no known rule: mistakes of training that its own steps can reproduce."""

    def goes_on(first: int, last: int) -> Recording:
        recordings.play(0, first)
        return record(
            [recordings.step(t, recordings.script.obs, recordings.flags_at(t, "false")) for t in range(first, last)],
            first,
        )

    trials: list[tuple[str, str, Callable[[int, int], Recording]]] = [
        ("starts-from-zeros", "each segment starts from an empty memory", lambda a, b: recordings.run(a, b)),
        ("reset-dropped-in-training", "no episode end clears anything", goes_on),
    ]
    return [
        (cause, story)
        for cause, story, play in trials
        if all(not recordings.compare(recordings.replayed(*w), play(*w)).any for w in recordings.windows())
    ]


def _wrong_start(recordings: Recordings) -> tuple[tuple[str, ...], str] | None:
    """Differences that begin with a segment and are gone after its first reset, under some rule of resets."""
    windows = recordings.windows()
    for guesses in zip(*[hypotheses.of_resets_in_training(recordings.script, *w) for w in windows]):
        guess, resets = guesses[0], [each.resets for each in guesses]
        if not _right_after_the_first_reset(recordings, resets):
            continue
        if all(_starts_one_late(recordings, *w, r) for w, r in list(zip(windows, resets))[1:]):
            cause, story = "late-by-one", "the stored start state is the one after the segment's first step"
        else:
            cause, story = "wrong-start-state", "the difference begins with a segment and ends with its first reset"
        return (cause, *guess.causes), f"{story}{', and ' if guess.story else ''}{guess.story}"
    return None


def _right_after_the_first_reset(recordings: Recordings, resets: list[Tensor]) -> bool:
    """Whether training equals the episodes played alone once a row was reset, and differs in some row before that.

    `resets`: for each segment, the resets `[N, B]` that it is supposed to follow.
    """
    differs_before = reset_after = False
    for (first, last), followed in zip(recordings.windows(), resets):
        difference = recordings.compare(recordings.replayed(first, last), recordings.alone(followed, first, last))
        after = _after_first_reset(followed, first, last)
        if bool((difference.where & after).any()):
            return False
        rows = (difference.where & ~after)[:2].any(0)  # a wrong start shows in a segment's first steps
        if bool((difference.where & ~after)[:, ~rows].any()):
            return False
        differs_before |= bool(rows.any())
        reset_after |= bool(after[:, rows].any())
    return differs_before and reset_after


def _after_first_reset(resets: Tensor, first: int, last: int) -> Tensor:
    """`[T, B]` past a row's first reset in this segment. The start of a run is no reset."""
    inside = resets[first:last].cpu().clone()
    inside[0] &= first > 0
    return inside.long().cumsum(0) > 0


def _starts_one_late(recordings: Recordings, first: int, last: int, resets: Tensor) -> bool:
    """Whether training starts from the state after the segment's first step: that step is then played twice."""
    recordings.play(0, first + 1)
    none = torch.zeros_like(resets[0])
    steps = [recordings.step(t, recordings.script.obs, (resets[t], none)) for t in range(first, last)]
    difference = recordings.compare(recordings.replayed(first, last), record(steps, first))
    return not bool((difference.where & ~_after_first_reset(resets, first, last)).any())


def _unexplained(recordings: Recordings, differences: dict[tuple[int, int], Difference]) -> tuple[str, str]:
    """No rule of resets fits. Where the difference begins says what it is."""
    rounding = _rounding(recordings, differences)
    if bool(differences[recordings.windows()[0]].where[0].any()):
        story = "they differ at the first step of a run already, where there is no memory yet"
        return "legs-differ", story + rounding
    for (first, last), difference in differences.items():
        if bool((difference.where & ~_after_first_reset(recordings.true_resets, first, last))[int(first == 0) :].any()):
            return "legs-differ", "they diverge in the middle of an episode, where nothing is reset" + rounding
    return "partial-reset", "the difference begins where training should have cleared the state"


def _rounding(recordings: Recordings, differences: dict[tuple[int, int], Difference]) -> str:
    size = float(recordings.rollout().output.abs().mean()) or 1.0
    relative = max(float(difference.sizes.median()) for difference in differences.values()) / size
    return (
        f" (typically by {relative:.1g} of their size: lower precision in one leg?)" if 1e-4 < relative < 2e-2 else ""
    )


def _ratio(recordings: Recordings, window: tuple[int, int], difference: Difference) -> str:
    text = f"training differs from the rollout {by_how_much(difference, window[0])}"
    mine, theirs = recordings.replayed(*window).log_prob, recordings.rollout().cut(*window).log_prob
    if mine is not None and theirs is not None:
        text += (
            f"; the probability ratio at epoch 0 is off by up to {float((mine - theirs).exp().sub(1).abs().max()):.2g}"
        )
    return text


@check("chunking", "the result does not depend on how a sequence is cut into calls")
def chunking(case: Case) -> str:
    recordings = case.recordings
    first, last = recordings.window
    cuts = [(first, first + 5), (first + 5, last), (first + 1, first + 2), (first, 2 * STEPS + 4)]
    if recordings.subject.whole_episodes or recordings.fresh_rollouts:
        cuts = cuts[:1]
    for window in cuts:
        difference = recordings.compare(
            recordings.replay(recordings.segment(*window)), recordings.rollout().cut(*window)
        )
        if difference.any:
            in_usual_segments = any(
                recordings.compare(recordings.replayed(*w), recordings.rollout().cut(*w)).any
                for w in recordings.windows()
            )
            return case.report(
                "depends-on-chunking",
                f"in one call over t={window[0]}..{window[1] - 1} the outputs differ from the rollout "
                f"{by_how_much(difference, window[0])}",
                because_of="any" if in_usual_segments else None,
            )
    return _minibatches(case) or _final_state(case)


def _minibatches(case: Case) -> str | None:
    """The project's own way of cutting a segment into minibatches, if it has one."""
    recordings = case.recordings
    for window in recordings.windows():
        segment = recordings.segment(*window)
        try:
            result = recordings.subject.minibatches(segment)
        except NotOffered:
            return None
        difference = recordings.compare(record_replay(result, segment.actions), recordings.replayed(*window))
        if difference.any:
            case.report(
                "depends-on-chunking", f"in minibatches the outputs differ {by_how_much(difference, window[0])}"
            )
            return " "
    return None


def _final_state(case: Case) -> str:
    """If the training leg returns a state, it must be the one that the rollout had there."""
    recordings = case.recordings
    for first, last in recordings.windows():
        state = recordings.replay_with_graph(recordings.segment(first, last)).state
        mine, theirs = tensors_in(state), tensors_in(recordings.rollout().mark_copies[last])
        if not mine or len(mine) != len(theirs) or any(a.shape != b.shape for a, b in zip(mine, theirs)):
            return "calls over 1, 5, 7 and 16 steps agree"
        pairs = [(to_numbers(a), to_numbers(b)) for a, b in zip(mine, theirs) if a.numel()]  # of bool or int, too
        largest = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
        if largest > 10 * recordings.tolerance * max(1.0, *(float(b.abs().max()) for _, b in pairs)):
            return case.report(
                "state-of-another-step",
                f"the state returned for t={first}..{last - 1} differs by {largest:.2g} from the state after t={last - 1}",
            )
    return "calls over 1, 5, 7 and 16 steps agree, and the returned states are those of the last step"
