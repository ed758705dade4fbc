"""The doctor names the one mistake of each broken policy, and finds none in its healthy twin."""

import pytest
import torch

from broken import ALL
from holdfast import doctor

NEEDS = {"sb3": "sb3_contrib", "torchrl": "torchrl"}
TWINS = {broken.healthy: f"twin-of-{broken.name}" for broken in reversed(ALL)}


def needed_by(name: str) -> str:
    """The package that a broken policy is made with."""
    return NEEDS.get(name.split("-")[0], "torch")


@pytest.mark.parametrize("broken", ALL, ids=lambda broken: broken.name)
def test_doctor_names_the_one_cause(broken):
    pytest.importorskip(needed_by(broken.name))
    torch.manual_seed(1)
    report = doctor.examine(broken.subject())
    errors = [f.cause for f in report.findings if f.severity == "error"]
    if broken.severity == "error":
        assert errors == [cause for cause in [broken.doctor] if cause], report.to_text()
    else:
        assert errors == [], report.to_text()
        assert broken.doctor in [f.cause for f in report.findings]


@pytest.mark.parametrize("healthy", TWINS, ids=TWINS.values())
def test_healthy_twin_has_no_error(healthy):
    pytest.importorskip(needed_by(TWINS[healthy].removeprefix("twin-of-")))
    torch.manual_seed(1)
    report = doctor.assert_healthy(healthy())
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


def test_there_are_broken_policies_of_many_kinds():
    # 14: a missing key is the caller's; 23: compiling is a check of its own; 24: kernels are not seen from outside
    assert {broken.case for broken in ALL} == set(range(1, 30)) - {14, 23, 24}
    assert len({broken.name.split("-")[0] for broken in ALL}) >= 9
    assert len({broken.name for broken in ALL}) == len(ALL)


def test_every_broken_policy_says_what_it_does_wrong():
    assert [broken.name for broken in ALL if not broken.does.endswith(".")] == []
