"""The HTML report in a real browser. `make test-browser` installs one; without it these are skipped."""

import chromium
import pytest
import torch
from patients import ALL

from holdfast import doctor

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="no chromium; make test-browser installs it")


@pytest.fixture
def open_page(tmp_path):
    pages = []

    def open_it(path):
        pages.append(chromium.Page(path, tmp_path / "profile"))
        return pages[-1]

    yield open_it
    for page in pages:
        page.close()


def _report(name):
    torch.manual_seed(1)
    patient = next(p for p in ALL if p.name == name)
    return doctor.examine(patient.sick())


def test_page_opens_without_complaints_and_without_network(tmp_path, open_page):
    path = _report("cleanrl-one-episode-in-training").to_html(tmp_path / "report.html")
    page = open_page(path)
    assert page.complaints == []
    outside = [url for url in page.requests if not url.startswith(("file://", "data:"))]
    assert outside == []
    text = page.text()
    assert "reset-dropped-in-training" in text
    assert "Credit map" in text
    page.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000


def test_the_page_watcher_sees_what_a_page_asks_for(tmp_path, open_page):
    """The test above can fail: a page with a script error and a remote picture is noticed."""
    path = tmp_path / "loud.html"
    path.write_text("<body><img src='http://127.0.0.1:9/x.png'><script>nothing_there()</script>hello</body>")
    page = open_page(path)
    assert any("nothing_there" in complaint for complaint in page.complaints)
    assert any(url.startswith("http://127.0.0.1:9/") for url in page.requests)
