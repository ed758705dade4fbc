"""The accuracy benchmark: what it counts, and one examination of each kind."""

from pathlib import Path

import pytest

from broken.base import Sizes, size

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import doctor_accuracy

    yield doctor_accuracy
    vars(size).update(vars(Sizes()))


def test_sizes_are_drawn_anew_for_each_seed_and_the_same_again(benchmark):
    draws = [benchmark.draw_sizes("own-slice", seed) for seed in range(5)]
    assert draws == [benchmark.draw_sizes("own-slice", seed) for seed in range(5)]
    assert len({tuple(draw.values()) for draw in draws}) == 5


def test_a_patient_and_a_twin_are_examined_at_drawn_sizes(benchmark):
    names = [name for name in benchmark.patients() if name.startswith(("module-chunks", "twin of module-chunks"))]
    rows = [benchmark.examine_one((name, 3)) for name in names]
    assert [(row.expected, row.right) for row in rows] == [("depends-on-chunking", True), (benchmark.HEALTHY, True)]


def test_rates_and_the_confusion_table_count_first_causes(benchmark):
    def row(expected, first, errors):
        return benchmark.Row("p" + expected, 0, {}, expected, first, errors, 0.5)

    nothing = benchmark.HEALTHY
    rows = [
        row("never-resets", "never-resets", ["never-resets"]),
        row("never-resets", "never-resets", ["never-resets", "legs-differ"]),
        row("never-resets", "partial-reset", ["partial-reset"]),
        row("late-by-one", "late-by-one", ["late-by-one"]),
        row(nothing, nothing, []),
        row(nothing, "memoryless", ["memoryless"]),
    ]
    figures = benchmark.summary(rows)
    assert (figures["right_first_cause"], figures["right_and_nothing_else"], figures["false_alarms"]) == (
        0.75,
        0.5,
        0.5,
    )
    table = {entry["mistake"]: entry["said"] for entry in benchmark.confusion(rows)}
    assert table["never-resets"] == {"never-resets": 2, "partial-reset": 1}
    header = dict.fromkeys(("command", "commit", "machine", "torch", "minutes"), "x")
    assert "| `never-resets` | 3 | `never-resets` 2, `partial-reset` 1 |" in benchmark.markdown(
        figures, benchmark.confusion(rows), header
    )
