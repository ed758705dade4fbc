"""The doctor over 20 seeds of script and weights: no false alarm in a healthy twin, the right cause in every patient."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "doctor"))

from patients import ALL

from holdfast import doctor

SEEDS = range(20)
TWINS = {patient.healthy: f"twin-of-{patient.name}" for patient in reversed(ALL)}


@pytest.mark.parametrize("healthy", TWINS, ids=TWINS.values())
def test_healthy_twins_have_no_error_at_any_seed(healthy):
    torch.set_num_threads(1)
    for seed in SEEDS:
        torch.manual_seed(seed)
        report = doctor.examine(healthy(), seed=seed)
        assert report.ok, f"seed {seed}: {report.to_text()}"


@pytest.mark.parametrize("patient", ALL, ids=[patient.name for patient in ALL])
def test_patients_are_diagnosed_at_other_seeds(patient):
    torch.set_num_threads(1)
    for seed in SEEDS[1:4]:
        torch.manual_seed(seed)
        report = doctor.examine(patient.sick(), seed=seed)
        errors = [f.cause for f in report.findings if f.severity == "error"]
        expected = [patient.cause] if patient.severity == "error" else []
        assert errors == expected, f"seed {seed}: {report.to_text()}"
