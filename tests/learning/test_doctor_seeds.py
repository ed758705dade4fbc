"""The doctor over 20 seeds of script and weights: no false alarm in a healthy twin, the right cause in every broken policy."""

import pytest
import torch

from broken import ALL
from holdfast import doctor
from learning.base_seed import BASE_SEED

SEEDS = range(100 * (BASE_SEED - 1), 100 * (BASE_SEED - 1) + 20)
TWINS = {broken.healthy: f"twin-of-{broken.name}" for broken in reversed(ALL)}


@pytest.mark.parametrize("healthy", TWINS, ids=TWINS.values())
def test_healthy_twins_have_no_error_at_any_seed(healthy):
    torch.set_num_threads(1)
    for seed in SEEDS:
        torch.manual_seed(seed)
        report = doctor.examine(healthy(), seed=seed)
        assert report.ok, f"seed {seed}: {report.to_text()}"


@pytest.mark.parametrize("broken", ALL, ids=[broken.name for broken in ALL])
def test_broken_policies_are_diagnosed_at_other_seeds(broken):
    torch.set_num_threads(1)
    for seed in SEEDS[1:4]:
        torch.manual_seed(seed)
        report = doctor.examine(broken.subject(), seed=seed)
        errors = [f.cause for f in report.findings if f.severity == "error"]
        expected = [broken.doctor] if broken.doctor and broken.severity == "error" else []
        assert errors == expected, f"seed {seed}: {report.to_text()}"
