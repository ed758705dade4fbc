"""The accuracy benchmark: what it counts, and one examination of each kind."""

from pathlib import Path

import pytest

from broken.base import Sizes, size

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import doctor_accuracy

    yield doctor_accuracy
    vars(size).update(vars(Sizes()))


def test_sizes_are_drawn_again_for_each_seed_and_the_same_again(script):
    draws = [script.draw_sizes("own-slice", seed) for seed in range(5)]
    assert draws == [script.draw_sizes("own-slice", seed) for seed in range(5)]
    assert len({tuple(draw.values()) for draw in draws}) == 5


def test_a_patient_and_a_twin_are_examined_at_drawn_sizes(script):
    names = [name for name in script.patients() if name.startswith(("module-chunks", "twin of module-chunks"))]
    rows = [script.examine_one((name, 3)) for name in names]
    assert [(row.expected, row.right) for row in rows] == [("depends-on-chunking", True), (script.HEALTHY, True)]


def test_rates_and_the_confusion_table_count_first_causes(script):
    def row(expected, first, errors):
        return script.Row("p" + expected, 0, {}, expected, first, errors, 0.5)

    nothing = script.HEALTHY
    rows = [
        row("never-resets", "never-resets", ["never-resets"]),
        row("never-resets", "never-resets", ["never-resets", "legs-differ"]),
        row("never-resets", "partial-reset", ["partial-reset"]),
        row("late-by-one", "late-by-one", ["late-by-one"]),
        row(nothing, nothing, []),
        row(nothing, "memoryless", ["memoryless"]),
    ]
    figures = script.summary(rows)
    assert (figures["right_first_cause"], figures["right_and_nothing_else"], figures["false_alarms"]) == (
        0.75,
        0.5,
        0.5,
    )
    table = {entry["mistake"]: entry["said"] for entry in script.confusion(rows)}
    assert table["never-resets"] == {"never-resets": 2, "partial-reset": 1}
    header = {
        **dict.fromkeys(("command", "commit", "machine", "torch", "minutes"), "x"),
        "left_out": {"sb3-flags": "sb3"},
    }
    assert "| `never-resets` | 3 | `never-resets` 2, `partial-reset` 1 |" in script.markdown(
        figures, script.confusion(rows), header
    )


def test_patients_of_missing_frameworks_are_named_and_others_are_not(script, monkeypatch):
    def needs_a_package():
        raise ModuleNotFoundError("No module named 'sb3_contrib'", name="sb3_contrib")

    def crashes():
        raise ZeroDivisionError

    made = {"a": ("x", needs_a_package), "b": ("x", crashes), "c": ("x", object)}
    monkeypatch.setattr(script, "patients", lambda: made)
    assert script.missing_packages(["a", "b", "c"]) == {"a": "sb3_contrib"}
    row = script.examine_one(("b", 0))
    assert (row.first, row.right) == (script.FAILED, False)


def test_examinations_that_were_kept_are_not_repeated(script, monkeypatch, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    flags = ["--seeds", "1", "--only", "module-chunks", "--rows", str(rows)]
    asked = []

    def examine_all(jobs, processes, seconds):
        asked.append(list(jobs))
        for name, seed in jobs[:1]:
            yield script.Row(name, seed, {}, "x", "x", [], 0.1)

    monkeypatch.setattr(script, "examine_all", examine_all)
    monkeypatch.setattr(script.os, "environ", {})
    for _ in range(3):
        monkeypatch.setattr("sys.argv", ["doctor_accuracy.py", *flags])
        script.main()
    assert [len(jobs) for jobs in asked] == [2, 1, 0]
    assert len(script.kept_rows(rows)) == 2
