"""The doctor names the one bug of each sick policy, and finds none in its healthy twin."""

import pytest
import torch
from patients import ALL

from holdfast import doctor

IDS = [patient.name for patient in ALL]
TWINS = {patient.healthy: f"twin-of-{patient.name}" for patient in reversed(ALL)}


@pytest.mark.parametrize("patient", ALL, ids=IDS)
def test_doctor_names_the_one_cause(patient):
    torch.manual_seed(1)
    report = doctor.examine(patient.sick())
    errors = [f.cause for f in report.findings if f.severity == "error"]
    if patient.severity == "error":
        assert errors == [patient.cause], report.to_text()
    else:
        assert errors == [], report.to_text()
        assert patient.cause in [f.cause for f in report.findings]


@pytest.mark.parametrize("healthy", TWINS, ids=TWINS.values())
def test_healthy_twin_has_no_error(healthy):
    torch.manual_seed(1)
    report = doctor.assert_healthy(healthy())
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


def test_there_are_patients_in_many_forms():
    assert len(ALL) >= 18
    unseen = {
        14,
        23,
        24,
    }  # a missing key is the caller's, compiling is a check of its own, kernels are not seen from outside
    assert {patient.case for patient in ALL} == set(range(1, 30)) - unseen
    assert len({patient.name.split("-")[0] for patient in ALL}) >= 4
    assert len({patient.name for patient in ALL}) == len(ALL)
