"""The doctor names each public mistake first, finds none in its repaired twin, and takes under 2 s."""

import time
from pathlib import Path

import pytest
import torch

from doctor.gallery import GALLERY
from holdfast import doctor

PAGE = (Path(__file__).parents[3] / "docs" / "gallery.md").read_text()


@pytest.mark.parametrize("exhibit", GALLERY, ids=lambda exhibit: exhibit.name)
def test_the_mistake_is_named_first_and_alone(exhibit):
    torch.manual_seed(1)
    started = time.process_time()
    report = doctor.examine(exhibit.subject())
    assert [f.cause for f in report.findings if f.severity == "error"] == [exhibit.doctor], report.to_text()
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    "healthy", list(dict.fromkeys(exhibit.healthy for exhibit in GALLERY)), ids=lambda kind: kind.__name__
)
def test_the_repaired_twin_has_no_error(healthy):
    torch.manual_seed(1)
    doctor.assert_healthy(healthy(), warnings=True)


def test_every_exhibit_is_told_on_the_page():
    assert len(GALLERY) >= 10
    for exhibit in GALLERY:
        assert exhibit.thread in PAGE, exhibit.name
        assert f"`{exhibit.doctor}`" in PAGE.split(exhibit.thread)[1].split("\n## ")[0], exhibit.name
