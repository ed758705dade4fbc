"""The tables, by hand."""

from __future__ import annotations

import pytest

from holdfast.profiling.clock import Spent
from holdfast.profiling.report import Timed, accounted, spans_table


def cells(lines: list[str]) -> dict[str, list[str]]:
    """Of each row, by the name of its part."""
    return {line[:60].strip(): line[60:].split() for line in lines}


def test_shares_and_rests_of_the_table_by_hand():
    spent = {("rollout",): Spent(2.0, 4), ("rollout", "policy"): Spent(1.5, 256), ("update",): Spent(6.0, 4)}
    timed = Timed(first=11, updates=4, steps=40_000, seconds=10.0, spent=spent)
    lines = spans_table(timed, unobserved_speed=5000.0)
    assert lines[0] == "where the time goes: updates 11 to 14, 2,500.0 ms each, 4,000 steps/s"
    found = cells(lines[3:8])
    assert found["rollout"] == ["500.00", "20.0%", "1"]
    assert found["policy"] == ["375.00", "15.0%", "64"]
    assert found["keeping the steps"] == ["125.00", "5.0%"]
    assert found["update"] == ["1,500.00", "60.0%", "1"]
    assert found["everything else"] == ["500.00", "20.0%"]
    assert "without it: 5,000 steps/s" in lines[-1]


def test_time_is_accounted_for_where_it_has_a_name():
    spent = {
        ("rollout",): Spent(2.0, 1), ("rollout", "policy"): Spent(1.5, 64), ("update",): Spent(6.0, 1),
        ("update", "minibatch"): Spent(5.0, 1), ("update", "minibatch", "forward"): Spent(4.0, 1),
    }  # fmt: skip
    # Of 10 seconds 2 are in no span, and 1 is the minibatch's outside its forward. What is left of rollout and update has a name.
    assert accounted(Timed(first=1, updates=1, steps=1, seconds=10.0, spent=spent)) == pytest.approx(0.7)


def test_rows_are_in_order_of_appearance_from_the_rollout_on():
    # The clock starts after an update: it sees the end of the loop first.
    names = ("log", "display", "rollout", "update", "checkpoint")
    spent = {(name,): Spent(1.0, 1) for name in names}
    spent["update", "minibatch"] = Spent(1.0, 8)
    lines = spans_table(Timed(first=1, updates=1, steps=1, seconds=5.0, spent=spent))
    assert list(cells(lines[3:-2])) == ["rollout", "update", "minibatch", "checkpoint", "log", "display"]


def test_a_span_with_no_name_for_its_rest_has_one_all_the_same():
    spent = {
        ("update",): Spent(4.0, 1),
        ("update", "minibatch"): Spent(4.0, 1),
        ("update", "minibatch", "x"): Spent(3.0, 1),
    }
    found = cells(spans_table(Timed(first=1, updates=1, steps=1, seconds=4.0, spent=spent))[3:])
    assert found["the rest of it"] == ["1,000.00", "25.0%"]
