"""What tables of results are called by."""

from __future__ import annotations

from bench.finished_runs import row, small_suite
from holdfast.bench.comparison import compare
from holdfast.bench.settings import name_of, stated

LONG = [{"env_kwargs": {"first_argument": 1, "second_argument": 2, "third": last}} for last in (3, 4)]


def test_long_values_that_differ_at_their_end_have_names_of_their_own():
    one, two = (name_of(False, changed) for changed in LONG)
    assert one != two and len(one) < 80 and one[:40] == two[:40]
    rows = [row("A", "gru", 1, value, value, setting=name) for value, name in ((0.1, one), (0.2, two))]
    assert sorted(found.cells["A", "gru"].value for found in compare(small_suite(), rows)) == [0.1, 0.2]


def test_long_settings_that_differ_at_their_end_are_both_stated():
    sizes = ([64] * 12, [64] * 11 + [32])
    assert " or " in stated([row("A", "gru", 1, 0.0, 0.0, config={"head_sizes": size}) for size in sizes])
