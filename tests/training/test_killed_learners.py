"""SAC and R2D2, killed while their buffers are written: a few of the kills of `make chaos`."""

from __future__ import annotations

import random
from pathlib import Path

from killed_learners import hunt


def test_killed_runs_that_learn_from_a_buffer_continue_as_if_they_had_never_stopped(tmp_path: Path):
    assert list(hunt(tmp_path, random.Random(7), 2)) == ["", ""]
