"""The 40 shapes of `gpu_shapes.py` are fixed by their seed, inside the stated ranges, and drawn as stated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def shapes_module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_shapes

    return gpu_shapes


def test_the_shapes_are_those_that_were_committed(shapes_module):
    drawn = shapes_module.shapes()
    assert drawn == shapes_module.shapes() and len(drawn) == len(set(drawn)) == 40
    assert drawn[:4] == [(3500, 97, 392), (3468, 113, 104), (3479, 56, 688), (5, 499, 168)]
    assert sum(B * T * H for B, T, H in drawn) == 912_690_664


def test_every_shape_is_in_range_and_fits(shapes_module):
    for seed in range(50):
        for B, T, H in shapes_module.shapes(seed):
            assert 1 <= B <= 8192 and 8 <= T <= 512 and 48 <= H <= 1024 and H % 8 == 0
            assert B * T * H <= shapes_module.LARGEST


def test_sizes_are_log_uniform(shapes_module):
    many = shapes_module.shapes(seed=7, count=4000)
    for size, low, high in ((0, 1, 8192), (2, 48, 1024)):
        below = sum(shape[size] < math.sqrt(low * high) for shape in many) / len(many)
        assert below == pytest.approx(0.5, abs=0.04)


def test_the_summary_names_shapes_that_are_slower(shapes_module):
    rows = [
        {"kind": "lstm", "B": 1, "T": 8, "H": 48, "eager": {"ratio": 4.0}, "graph": {"ratio": 1.0}},
        {"kind": "lstm", "B": 2, "T": 9, "H": 56, "eager": {"ratio": 0.25}, "graph": {"ratio": 4.0}},
        {"kind": "lstm", "B": 3, "T": 9, "H": 56, "error": "out of memory"},
    ]
    found = shapes_module.summary(rows)
    assert found["lstm, eager"] == {
        "geometric_mean": 1.0,
        "smallest": 0.25,
        "shapes": 2,
        "below_1": ["2 x 9 x 56: 0.25"],
    }
    assert found["lstm, graph"]["geometric_mean"] == pytest.approx(2.0) and found["lstm, graph"]["below_1"] == []
    assert "gru, eager" not in found
