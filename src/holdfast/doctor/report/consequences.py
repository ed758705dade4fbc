"""Which findings follow from which: one bug is one error, with its consequences listed under it."""

from __future__ import annotations

from holdfast.doctor.report.findings import Finding


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RESETS = _words("""
    never-resets truncation-ignored termination-ignored late-by-one early-by-one partial-reset index-not-mask
    resets-everybody common-ends-ignored reset-dropped-in-training boundary-lost-at-segment-start
""")
_STARTS = _words("starts-from-zeros wrong-start-state late-by-one depends-on-chunking state-of-another-step")
_GAPS = _RESETS | _STARTS | _words("legs-differ eval-differs eval-never-resets eval-memoryless")
_ANYTHING = _GAPS | _words("""
    wrong-environment layout-swapped sees-the-future padding-leaks shared-between-agents gradient-crosses-reset
    over-detached gradient-distorted bootstrap-after-reset bootstrap-of-another-step bootstrap-moves-memory reset-does-nothing
    memory-lost-on-resume nan-survives
    missing-flags-reset start-state-aliased memoryless check-failed-to-run not-repeatable random-training-leg
    training-moves-memory
""")
_SCATTERED = _words("wrong-environment over-detached gradient-distorted")
_AT_A_RESET = _words("gradient-crosses-reset nan-survives depends-on-chunking")

#: cause: the causes that it produces in later checks
FOLLOWS: dict[str, frozenset[str]] = {
    "random-training-leg": _ANYTHING,
    "not-repeatable": _ANYTHING,
    "batch-statistics": _ANYTHING,
    "normaliser-moved": _ANYTHING - {"memoryless", "over-detached"},
    "memoryless": _ANYTHING,
    "training-moves-memory": _STARTS | _words("legs-differ partial-reset random-training-leg gradient-crosses-reset"),
    "wrong-environment": _ANYTHING,
    "layout-swapped": _ANYTHING,
    "sees-the-future": _GAPS | {"gradient-crosses-reset"},
    "gradients-severed": frozenset({"over-detached", "gradient-distorted"}),
    "graph-kept": frozenset({"check-failed-to-run"}),
    "starts-from-zeros": frozenset({"depends-on-chunking", "state-of-another-step"}),
    "late-by-one": _AT_A_RESET | {"state-of-another-step"},
    "wrong-start-state": frozenset({"depends-on-chunking", "state-of-another-step"}),
    "legs-differ": frozenset({"depends-on-chunking", "state-of-another-step", "eval-differs"}),
    "batch-size-baked-in": frozenset({"memory-in-state-dict", "check-failed-to-run"}),
    "missing-flags-reset": frozenset({"eval-memoryless"}),
    "flags-not-bool": _ANYTHING,
    **{cause: _AT_A_RESET | {"truncation-ignored"} for cause in _RESETS - {"late-by-one"}},
    "index-not-mask": _ANYTHING - {"memoryless", "starts-from-zeros"},
    **{cause: _AT_A_RESET | _GAPS | _SCATTERED for cause in ("resets-everybody", "early-by-one")},
}

#: checks of what training computes, and checks of the rollout leg alone: the first explain nothing in the second
_TRAINING = _words("training-apart stored-state training-rows padding replay chunking gradient-flow gradient-isolation")
_ROLLOUT = _words("nan environment-ids agents bootstrap evaluation reset-call checkpoint")
#: checks of one call besides the two legs, which are right: nothing follows from them
_BESIDES = _words("environment-ids agents bootstrap evaluation reset-call checkpoint nan")


def follows_from(found: Finding, root: Finding) -> bool:
    """Whether a later check reports `found` because of `root`."""
    if root.check in _BESIDES:
        return False
    both_differ = root.cause == "legs-differ" and found.cause == "eval-differs"
    if root.check in _TRAINING and found.check in _ROLLOUT and not both_differ:
        return False
    return found.cause in FOLLOWS.get(root.cause, frozenset())
