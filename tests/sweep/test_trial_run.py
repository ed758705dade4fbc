"""Scores of trials."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from holdfast.sweep.trial_run import area


def write(folder: Path, *rows: str) -> Path:
    (folder / "progress.csv").write_text("\n".join(["update,steps,rollout/ep_rew_mean", *rows]) + "\n")
    return folder


def test_the_area_under_a_learning_curve(tmp_path: Path):
    # 0 to 100: the first value; 100 to 200: from 0 to 1; then 1 to the end.
    run = write(tmp_path, "1,50,nan", "2,100,0.0", "3,200,1.0")
    assert area(run, 400) == pytest.approx((100 * 0 + 100 * 0.5 + 200 * 1) / 400)


def test_what_a_last_rollout_plays_beyond_the_end_does_not_count(tmp_path: Path):
    run = write(tmp_path, "1,100,2.0", "2,300,2.0")
    assert area(run, 200) == pytest.approx(2.0)


def test_a_run_without_an_episode_has_no_area(tmp_path: Path):
    assert math.isnan(area(write(tmp_path, "1,100,"), 200)) and math.isnan(area(tmp_path / "nothing", 200))
