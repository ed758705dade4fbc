"""PufferLib's form of a policy."""

import torch

from broken.puffer_policies import NeverResets
from holdfast import doctor
from holdfast.doctor import subjects


def test_pufferlibs_trainer_has_two_bugs():
    """Nothing is reset, and training starts from nothing: two errors, with their consequences beneath them."""
    torch.manual_seed(0)
    report = doctor.examine(subjects.Puffer(NeverResets(), (4,), start="nothing"))
    assert sorted(f.cause for f in report.findings if f.severity == "error") == ["never-resets", "starts-from-zeros"]
