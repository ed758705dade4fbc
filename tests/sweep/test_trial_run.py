"""Scores of trials."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.sweep.trial_run import _trainer, _Watch, area


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


def attempt(folder: Path, updates: int | None = None, **changes: Any) -> hf.Trainer:
    """Train in the folder of a trial, to the end or for some updates."""
    sizes = dict(hidden_size=4, num_envs=2, num_steps=8, epochs=1, minibatches=1, total_steps=64, final_eval_episodes=1)
    more: dict[str, Any] = {"threads": 1, "device": "cpu", "tensorboard": False, "quiet": True, **sizes, **changes}
    config = hf.TrainConfig("holdfast/TMaze-v0", core="gru", run_dir=str(folder), **more)
    done: list[None] = []
    watch = _Watch(None, 0, False, lambda: False)
    watch.on_update_end = lambda *_: not done.append(None) and len(done) != updates  # type: ignore[method-assign]
    trainer = _trainer(config, watch)
    trainer.run()
    return trainer


def test_an_attempt_goes_on_with_the_run_of_its_settings(tmp_path: Path):
    attempt(tmp_path / "0000", updates=2)
    again = attempt(tmp_path / "0000", checkpoint_every=7)
    assert again.resumed_from is not None and again.update == 4
    assert [path.name for path in tmp_path.iterdir()] == ["0000"]


def test_a_run_of_other_settings_is_not_taken_for_the_trial(tmp_path: Path):
    attempt(tmp_path / "0000")
    for changes, name in (
        ({"learning_rate": 0.05}, "0000-again"),
        ({"seed": 51}, "0000-again2"),
        ({"learning_rate": 0.05}, "0000-again"),
        ({}, "0000"),
    ):
        trainer = attempt(tmp_path / "0000", **changes)
        assert Path(trainer.config.run_dir or "").name == name
        assert all(getattr(trainer.config, setting) == value for setting, value in changes.items())
    assert len(list(tmp_path.iterdir())) == 3


def test_updates_of_other_settings_without_a_checkpoint_do_not_fail_the_trial(tmp_path: Path):
    attempt(tmp_path / "0000", updates=1)
    shutil.rmtree(tmp_path / "0000" / "checkpoints")
    assert Path(attempt(tmp_path / "0000", gamma=0.9).config.run_dir or "").name == "0000-again"
    assert Path(attempt(tmp_path / "0000").config.run_dir or "").name == "0000"


def test_a_trial_may_overlap_rollouts_and_updates(tmp_path: Path):
    config = hf.TrainConfig("holdfast/TMaze-v0", hidden_size=4, device="cpu", run_dir=str(tmp_path), quiet=True)
    trainer = _trainer(config, _Watch(None, 0, True, lambda: False))
    assert trainer._may_prefetch()
    trainer.callbacks[0].only_watches = False
    assert not trainer._may_prefetch(), "a hook that may change the run does not let the next rollout start early"
