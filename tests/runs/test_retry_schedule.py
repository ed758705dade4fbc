"""When a failed write is tried again, and what the user hears of it."""

from __future__ import annotations

from itertools import pairwise

from holdfast.runs.writing import RetrySchedule


def test_waits_double_up_to_a_limit_and_the_user_hears_of_the_beginning_and_the_end():
    said: list[str] = []
    retry = RetrySchedule(said.append)
    assert retry.record(None, 1) and not said, "all is well"
    attempts, update = [], 10
    assert not retry.record("disk full", update)
    for update in range(11, 400):
        if retry.should_retry(update):
            attempts.append(update)
            assert not retry.record("disk full", update)
        else:
            assert retry.must_wait(update)
    assert attempts[:6] == [11, 13, 17, 25, 41, 73]
    assert {b - a for a, b in pairwise(attempts[6:])} == {RetrySchedule.LONGEST_WAIT}
    assert len(said) == 1 and "disk full" in said[0]
    assert retry.record(None, update) and len(said) == 2
    assert not retry.should_retry(update + 100) and not retry.must_wait(update + 1)
