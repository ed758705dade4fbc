"""Results next to what they are compared with."""

from __future__ import annotations

import pytest

from bench.finished_runs import SMALL, row, small_suite
from holdfast.bench.comparison import compare
from holdfast.bench.table import markdown

ROWS = [
    row("A", "gru", 1, 1.2, 1.0),
    row("A", "gru", 2, 1.6, 1.4),
    row("A", "lru", 1, 1.49, 1.4),
    row("A", "none", 1, 0.1, 0.0),
    row("B", "gru", 1, 410.0, 399.0),
    row("B", "none", 1, 50.0, 40.0),
]


def test_a_core_is_compared_with_its_own_published_figure_or_the_best():
    (found,) = compare(small_suite(), ROWS)
    assert found.cores == ("gru", "none", "lru")
    gru, lru, none = (found.cells["A", core] for core in ("gru", "lru", "none"))
    assert (gru.value, gru.deviation) == (pytest.approx(1.4), pytest.approx(0.4 / 2**0.5))
    assert (gru.difference.to, gru.difference.value, gru.difference.part) == (
        "their GRU",
        pytest.approx(0.4),
        pytest.approx(0.2),
    )
    assert (gru.difference.mark, gru.difference.level) == ("▲", 2)
    assert (lru.difference.to, lru.difference.mark, lru.difference.level) == ("their best", "=", 0)
    assert none.difference is None


def test_a_target_is_reached_or_not():
    (found,) = compare(small_suite(), ROWS)
    assert (found.cells["B", "gru"].difference.to, found.cells["B", "gru"].difference.mark) == ("target", "✓")
    (final,) = compare(small_suite(statistic="final"), ROWS)
    short = final.cells["B", "gru"].difference
    assert (short.mark, short.value) == ("✗", -1.0)


def test_scores_are_normalized_over_the_tasks_that_have_a_range():
    (found,) = compare(small_suite(), [*ROWS, row("C", "gru", 1, 9.0, 9.0, steps=500)])
    assert [table.title for table in found.aggregates] == [
        "All tasks",
        "Tasks with a figure of their GRU",
        "Tasks with a figure of their best",
    ]
    everywhere = {one.name: one for one in found.aggregates[0].rows}
    # A: 1.2/2 and 1.6/2; B: 390/480
    assert everywhere["gru"].estimates["mean"].value == pytest.approx((0.7 + 390 / 480) / 2)
    assert (everywhere["gru"].tasks, everywhere["gru"].runs) == (2, 3)
    theirs = {one.name: one.estimates["mean"].value for one in found.aggregates[1].rows}
    assert theirs == pytest.approx({"gru": 0.7, "none": 0.05, "lru": 0.745, "their GRU": 0.5})


def test_runs_of_other_lengths_and_settings_are_kept_apart():
    rows = [*ROWS, row("A", "gru", 1, 9.0, 9.0, steps=77), row("A", "gru", 1, 1.9, 1.9, setting="tuned")]
    default, tuned = compare(small_suite(), rows)
    assert (default.setting, tuned.setting) == ("default", "tuned")
    assert default.cells["A", "gru"].value == pytest.approx(1.4)
    assert list(tuned.cells) == [("A", "gru")]
    assert [found.cells["A", "gru"].value for found in compare(small_suite(), rows, steps=77)] == [9.0]
    assert compare(small_suite(), rows, steps=78) == []


def test_a_run_without_a_finished_episode_counts_with_its_final_return():
    (found,) = compare(small_suite(), [row("A", "gru", 1, None, 0.7, curve=[])])
    assert found.cells["A", "gru"].value == 0.7


def test_the_markdown_table_shows_ours_next_to_theirs():
    suite = small_suite()
    text = markdown(suite, compare(suite, [*ROWS, row("A", "gru", 1, 1.9, 1.8, setting="tuned")]))
    assert "| task | steps | random | target | their GRU | their best | gru | none (memoryless control) | lru |" in text
    assert (
        "| A | 1,000 | 0.000 |  | 1.000 | 1.500 | 1.400 ± 0.283 ▲ +0.400 (1.200) | 0.100 (0.000) | 1.490 = −0.010 (1.400) |"
    ) in text
    assert "| B | 1,000 | 20.0 | 400.0 |  |  | 410.0 ✓ +10.0 (399.0) | 50.0 (40.0) |  |" in text
    assert "their GRU: a paper (second-hand)." in text
    assert "## With settings per family (--tuned)" in text
    assert "| A | 3.0 (2.0), 500/s | 3.0 (2.0), 500/s | 3.0 (2.0), 500/s |" in text
    assert (
        "runs: 7; tasks: 2; steps in all: 7k; wall clock, up to the last finished run of each command: 0:06; " in text
    )


def test_texts_of_a_suite_and_of_its_results_are_no_markup_and_no_commands():
    """A suite and a file of results may come from anywhere."""
    bad = "\x1b]0;owned\x07\u202e\n# fake [x](http://y)<script>"
    published = {key: {"name": bad, "source": bad} for key in SMALL["published"]}
    suite = small_suite(title=bad, note=bad, published=published)
    rows = [row("A", "gru", seed, 1.0, 0.5, device=bad, commit=bad) for seed in (1, 2)]
    text = markdown(suite, compare(suite, rows))
    assert text.count("owned") >= 5
    assert not any(sign in text for sign in ("\x1b", "\x07", "\u202e", "\n# fake", " [x]", "<script"))
