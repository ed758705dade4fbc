"""The suite fails where it should: each of the broken Holdfast policies does one thing wrong, as real projects did."""

from __future__ import annotations

import pytest

from broken import OF_HOLDFAST
from broken.holdfast_loops import Loop, driver_of
from conformance import test_isolation, test_lifecycle, test_precision, test_replay

SUITE = {
    name: test
    for module in (test_isolation, test_lifecycle, test_precision, test_replay)
    for name, test in vars(module).items()
    if name.startswith("test_")
}
CASES = [(broken, test) for broken in OF_HOLDFAST for test in broken.conformance]
ARGUMENTS = {"test_a_reset_clears_nan_and_inf_and_touches_no_other_environment": {"poison": float("nan")}}


@pytest.mark.parametrize(("broken", "test"), CASES, ids=[f"{broken.name}-{test}" for broken, test in CASES])
def test_a_broken_policy_fails(broken, test):
    with pytest.raises(AssertionError):
        SUITE[test](make=broken.driver, **ARGUMENTS.get(test, {}))


def test_every_broken_policy_is_noticed_by_some_test():
    assert [broken.name for broken in OF_HOLDFAST if not broken.conformance] == []


@pytest.mark.parametrize("test", sorted({test for _, test in CASES}))
def test_the_same_policy_unbroken_passes(test):
    SUITE[test](make=lambda: driver_of(Loop), **ARGUMENTS.get(test, {}))
