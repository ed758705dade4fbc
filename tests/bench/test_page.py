"""The HTML page: as text, and in a real browser. `make test-browser` installs one; without it those tests are skipped."""

from __future__ import annotations

import re

import pytest

from bench.finished_runs import row, small_suite
from doctor.report import chromium
from holdfast.bench.comparison import compare
from holdfast.bench.page import page

ROWS = [
    row("A", "gru", 1, 1.2, 1.0, device="<GPU>", engine={"rollout": "CUDA graph", "update": "CUDA graph"}),
    row("A", "gru", 2, 1.6, 1.4),
    row("A", "none", 1, 0.1, 0.0, curve=[]),
    row("B", "gru", 1, 300.0, 299.0),
    row("A", "gru", 1, 1.9, 1.9, setting="tuned"),
]


@pytest.fixture
def text():
    suite = small_suite()
    return page(suite, compare(suite, ROWS))


def test_the_page_has_no_script_and_no_address(text):
    for word in ("<script", "http://", "https://", "@import", "src=", "url("):
        assert word not in text
    assert "default-src 'none'" in text


def test_names_are_escaped(text):
    assert "A &lt;small&gt; suite" in text and "&lt;GPU&gt;" in text
    assert "<small> suite" not in text and "<GPU>" not in text


def test_differences_have_a_color_and_a_sign(text):
    assert re.search(
        r'<td class="up2" title="seed 1: 1.200, seed 2: 1.600"><b>1.400</b> ▲ \+0.400<small>final 1.200</small>', text
    )
    assert re.search(r'<td class="down2" title="seed 1: 300.0"><b>300.0</b> ✗ −100.0', text)
    assert "± 0.283, 2 seeds" in text


def test_a_memory_that_was_not_trained_on_all_tasks_says_so_next_to_its_score(text):
    assert text.count("none (1 task)") == 1 and "none (memoryless control) (1 task)" in text  # its mark and its profile
    assert "gru (" not in text.partition("In one number")[2].partition("Mean, median")[0]


def test_each_part_is_there(text):
    assert text.count("<figure>") == 3  # a chart per task and setting
    assert "Performance profile" in text and "With settings per family (--tuned)" in text
    assert "their GRU</b>: a paper (second-hand)." in text
    assert "none (memoryless control)" in text


def test_every_series_has_a_dash_pattern_of_its_own(text):
    lines = re.findall(r'<path class="line" d="M1 5H33" ([^/]*)/>', text)
    assert len(lines) >= 2 and len(set(lines[:2])) == 2
    assert "stroke-dasharray" not in lines[0] and "stroke-dasharray" in lines[1]


def test_a_page_of_one_run_without_a_curve_or_a_range_is_a_page():
    suite = small_suite()
    only = row("C", "gru", 1, None, 5.0, steps=500, curve=[])
    text = page(suite, compare(suite, [only]))
    assert "<b>5.000</b>" in text and "In one number" not in text


@pytest.mark.skipif(chromium.find() is None, reason="no chromium; make test-browser installs it")
def test_the_page_opens_without_complaints_and_without_network(text, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(text)
    browser = chromium.Page(path, tmp_path / "profile")
    try:
        assert browser.complaints == []
        assert [url for url in browser.requests if not url.startswith(("file://", "data:"))] == []
        assert "Every task" in browser.text()
        browser.screenshot(tmp_path / "phone.png", width=375)
        assert (tmp_path / "phone.png").stat().st_size > 20_000
    finally:
        browser.close()
