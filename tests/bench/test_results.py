"""`results.jsonl` survives a kill at any byte."""

from __future__ import annotations

import json

import pytest

from bench.finished_runs import row
from holdfast.bench import results


def test_rows_read_back_in_order(tmp_path):
    file = tmp_path / "results.jsonl"
    rows = [row("A", "gru", seed, 0.1 * seed, 0.5) for seed in range(3)]
    for one in rows:
        results.append(file, one)
    assert results.read(file) == (rows, 0)
    assert results.read(tmp_path / "none") == ([], 0)


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_torn_line_is_skipped_and_the_next_line_stays_whole(tmp_path, cut):
    file = tmp_path / "results.jsonl"
    first, second, third = (row("A", "gru", seed, 0.0, 0.0) for seed in range(3))
    results.append(file, first)
    whole = file.read_bytes()
    torn = (json.dumps(second) + "\n").encode()[:cut]  # cut off anywhere; -1: all but the newline
    file.write_bytes(whole + torn)
    results.append(file, third)
    rows, damaged = results.read(file)
    assert rows == ([first, second, third] if cut == -1 else [first, third])
    assert damaged == (0 if cut == -1 else 1)
    assert file.read_bytes().startswith(whole + torn)  # nothing is rewritten


@pytest.mark.parametrize("line", ["null", "[]", '{"id": "x"}', '{"id": 1, "task": "A"}', "not json", "\udcff"])
def test_lines_that_are_no_results_are_counted(tmp_path, line):
    file = tmp_path / "results.jsonl"
    file.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    results.append(file, row("A", "gru", 1, 0.0, 0.0))
    rows, damaged = results.read(file)
    assert len(rows) == 1 and damaged == 1


def test_a_failed_run_is_not_finished_and_the_latest_result_counts():
    failed = {**row("A", "gru", 1, 0.0, 0.0), "error": "no"}
    del failed["final"]
    old, new = row("B", "gru", 1, 0.1, 0.1, id="old"), row("B", "gru", 1, 0.2, 0.2, id="new")
    assert results.finished([failed, old, new]) == {"old": old, "new": new}
    assert results.latest([failed, old, new]) == [new]


def test_wall_clock_is_summed_over_commands():
    def made(began, elapsed):
        return row("A", "gru", 1, 0.0, 0.0, command={"began": began, "elapsed": elapsed})

    assert results.wall_seconds([made("x", 5.0), made("x", 9.0), made("y", 2.5)]) == 11.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final", "0.5"), ("final", None), ("final", float("nan")), ("final", 10**400), ("best", [1]), ("steps", 10**400),
        ("seed", -(10**400)), ("seconds", "fast"), ("engine", "C"), ("engine", {"update": 5}), ("config", []), ("command", "x"),
        ("command", {"elapsed": "long"}), ("curve", 5), ("curve", [5]), ("curve", [[1, "x"]]), ("curve", [[1, 2, 3]]),
    ],
)  # fmt: skip
def test_a_row_that_no_report_could_show_counts_as_damaged(tmp_path, name, value):
    file = tmp_path / "results.jsonl"
    good = row("A", "gru", 1, 0.1, 0.5)
    file.write_text("\n".join([json.dumps({**good, name: value}), "[" * 100_000, json.dumps(good)]))
    assert results.read(file) == ([good], 2)
