"""How much was run, on what, and how long it took: the first lines of the table and of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.bench.comparison import Comparison
from holdfast.bench.results import wall_seconds
from holdfast.display.dashboard import clock, compact


def facts(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Names and values, without those that are not known.

    The wall clock of a command ends with its last finished run: when a command is stopped, what it did after that is not in it.
    """
    rows = [row for comparison in comparisons for row in comparison.runs]
    steps = sum(int(row.get("trained_steps") or row["steps"]) for row in rows)
    seconds = wall_seconds(rows)
    found = {
        "runs": str(len(rows)),
        "tasks": str(len({row["task"] for row in rows})),
        "steps in all": compact(steps),
        "wall clock, up to the last finished run of each command": clock(seconds) if seconds else "",
        "steps per second of that time": compact(steps / seconds) if seconds else "",
        "device": ", ".join(_unique(row.get("device") for row in rows)),
        "commit": ", ".join(commit[:10] for commit in _unique(row.get("commit") for row in rows)),
    }
    return {name: value for name, value in found.items() if value}


def _unique(values: Any) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value))
