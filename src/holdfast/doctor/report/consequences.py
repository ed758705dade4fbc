"""Which findings follow from which: one bug is one error, with its consequences listed under it."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RESETS = _words("""
    never-resets truncation-ignored termination-ignored late-by-one early-by-one partial-reset index-not-mask
    resets-everybody reset-dropped-in-training boundary-lost-at-segment-start
""")
_STARTS = _words("starts-from-zeros wrong-start-state late-by-one depends-on-chunking state-of-another-step")
_GAPS = _RESETS | _STARTS | _words("legs-differ eval-differs eval-never-resets eval-memoryless")
_ANYTHING = _GAPS | _words("""
    wrong-environment layout-swapped sees-the-future padding-leaks shared-between-agents gradient-crosses-reset
    over-detached bootstrap-after-reset bootstrap-moves-memory reset-does-nothing memory-lost-on-resume nan-survives
    missing-flags-reset start-state-aliased memoryless check-failed-to-run not-repeatable random-training-leg
""")
_AT_A_RESET = _words("gradient-crosses-reset nan-survives depends-on-chunking eval-never-resets")

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
    "start-state-aliased": _GAPS | {"wrong-environment"},
    "gradients-severed": frozenset({"over-detached"}),
    "graph-kept": frozenset({"check-failed-to-run"}),
    "starts-from-zeros": frozenset({"depends-on-chunking", "state-of-another-step"}),
    "late-by-one": _AT_A_RESET | {"state-of-another-step"},
    "wrong-start-state": frozenset({"depends-on-chunking", "state-of-another-step"}),
    "legs-differ": frozenset({"depends-on-chunking", "state-of-another-step", "eval-differs"}),
    "batch-size-baked-in": frozenset({"memory-in-state-dict", "check-failed-to-run"}),
    "missing-flags-reset": frozenset({"eval-memoryless"}),
    "flags-not-bool": _ANYTHING,
    **{cause: _AT_A_RESET | {"truncation-ignored"} for cause in _RESETS - {"late-by-one"}},
    **{cause: _ANYTHING - {"memoryless"} for cause in ("index-not-mask", "resets-everybody", "early-by-one")},
}
