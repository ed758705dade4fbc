"""The HTML report: as text, and in a real browser. `make test-browser` installs one; without it those are skipped."""

import re
from dataclasses import replace

import pytest

from doctor.report import chromium
from holdfast.causes import CAUSES
from holdfast.doctor.report.html import prose

in_a_browser = pytest.mark.skipif(chromium.find() is None, reason="no chromium; make test-browser installs it")


def test_html_is_one_page_without_script_or_address(reports, tmp_path):
    path = reports["leaking"].to_html(tmp_path / "report.html")
    text = path.read_text()
    for word in ("<script", "http://", "https://", "@import", "src="):
        assert word not in text
    assert "default-src 'none'" in text


def test_names_are_escaped(reports, tmp_path):
    text = replace(reports["healthy"], subject="<b>A&B").to_html(tmp_path / "x.html").read_text()
    assert "&lt;b&gt;A&amp;B" in text and "<b>A&B" not in text


def test_emphasis_and_code_are_shown_as_such(reports, tmp_path):
    text = reports["leaking"].to_html(tmp_path / "x.html").read_text()
    assert '<pre class="patch">' in text and "<ins>+ " in text and "<del>- " in text
    body = text.split("</style>")[1]
    assert not re.search(r"\*\w+\*", body)
    for cause, entry in CAUSES.items():
        shown = prose(entry.meaning + entry.fix)
        assert "`" not in shown and not re.search(r"\*\w+\*", shown), cause


@pytest.fixture
def open_page(tmp_path):
    pages = []

    def open_it(path):
        pages.append(chromium.Page(path, tmp_path / "profile"))
        return pages[-1]

    yield open_it
    for page in pages:
        page.close()


@in_a_browser
def test_page_opens_without_complaints_and_without_network(reports, tmp_path, open_page):
    path = reports["leaking"].to_html(tmp_path / "report.html")
    page = open_page(path)
    assert page.complaints == []
    outside = [url for url in page.requests if not url.startswith(("file://", "data:"))]
    assert outside == []
    text = page.text()
    assert "reset-dropped-in-training" in text
    assert "Credit map" in text
    page.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000


@in_a_browser
def test_the_page_watcher_sees_what_a_page_asks_for(tmp_path, open_page):
    """The test above can fail: a page with a script error and a remote picture is noticed."""
    path = tmp_path / "loud.html"
    path.write_text("<body><img src='http://127.0.0.1:9/x.png'><script>nothing_there()</script>hello</body>")
    page = open_page(path)
    assert any("nothing_there" in complaint for complaint in page.complaints)
    assert any(url.startswith("http://127.0.0.1:9/") for url in page.requests)
