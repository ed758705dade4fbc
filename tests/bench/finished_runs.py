"""Suites and results made by hand, for the tests in this folder."""

from __future__ import annotations

from typing import Any

from holdfast.bench.suite import Suite, parse

SMALL: dict[str, Any] = {
    "name": "small",
    "title": "A <small> suite",
    "steps": 1000,
    "cores": ["gru", "none"],
    "control": ["none"],
    "statistic": "best",
    "tasks": [
        {"name": "A", "env": "holdfast/TMaze-v0", "family": "F", "low": 0, "high": 2, "published": {"gru": 1.0, "best": 1.5}},
        {"name": "B", "env": "CartPole-v1", "low": 20, "high": 500, "target": 400},
        {"name": "C", "env": "holdfast/TMaze-v0", "family": "F", "steps": 500},
    ],
    "published": {
        "gru": {"name": "their GRU", "source": "a paper", "cores": ["gru"], "second_hand": True},
        "best": {"name": "their best", "source": "a paper"},
    },
    "tuned": {"F": {"gamma": 0.5}},
}  # fmt: skip


def small_suite(**changes: Any) -> Suite:
    return parse({**SMALL, **changes}, "small.toml")


def row(task: str, core: str, seed: int, best: float | None, final: float, **more: Any) -> dict[str, Any]:
    """A line of results."""
    return {
        "id": f"{task}-{core}-{seed}",
        "task": task,
        "core": core,
        "seed": seed,
        "steps": 1000,
        "setting": "default",
        "best": best,
        "final": final,
        "seconds": 2.0,
        "wall_seconds": 3.0,
        "steps_per_second": 500.0,
        "curve": [[100, 0.0], [1000, best]],
        "command": {"began": "2026-01-01T00:00:00", "elapsed": 3.0 * seed, "jobs": 1},
        **more,
    }
