"""The replicas of public mistakes that are written in JAX: the cause comes first, in under 2 s once compiled."""

import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("jax")

from doctor.gallery.jax_pairs import EXHIBITS, repaired
from holdfast import doctor

PAGE = (Path(__file__).parents[3] / "docs" / "gallery.md").read_text()


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_the_mistake_is_named_first_and_alone(exhibit):
    torch.manual_seed(1)
    broken = exhibit.subject()
    doctor.examine(broken)
    started = time.process_time()
    report = doctor.examine(broken, seed=1)
    assert time.process_time() - started < 2.0
    assert [f.cause for f in report.findings if f.severity == "error"] == [exhibit.doctor], report.to_text()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_repaired_twin_has_no_finding(seed):
    torch.manual_seed(seed)
    assert doctor.examine(repaired(), seed=seed).findings == ()


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_the_exhibit_is_told_on_the_page(exhibit):
    assert f"`{exhibit.doctor}`" in PAGE.split(exhibit.thread)[1].split("\n## ")[0]
