import json
import math

import numpy as np
import pytest

from holdfast.display import plot
from holdfast.display.plot import confidence_interval, group_runs, plot_runs, read_run
from holdfast.runs.log import RunLog

pytest.importorskip("matplotlib")


def write_run(folder, seed, values, steps_per_update=10, **config):
    log = RunLog(folder, tensorboard=False, wandb=False, config={})
    for i, value in enumerate(values, 1):
        row = {"update": i, "steps": i * steps_per_update, "rollout/ep_rew_mean": value, "time/fps": 1.0}
        log.write(row, i * steps_per_update)
    log.close()
    settings = {"env": "holdfast/TMaze-v0", "core": "lstm", "hidden_size": 64, "seed": seed, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_the_interval_is_students(tmp_path):
    mean, interval = confidence_interval(np.array([[1.0], [2.0], [3.0]]))
    assert mean == [2.0]
    half = 4.303 / math.sqrt(3)  # deviation 1, two degrees of freedom
    np.testing.assert_allclose(interval[:, 0], [2 - half, 2 + half])
    assert confidence_interval(np.ones((1, 4)))[1] is None
    many = np.random.default_rng(0).normal(size=(30, 1))
    mean, interval = confidence_interval(many)
    assert interval[1, 0] - mean[0] == pytest.approx(1.96 * many.std(ddof=1) / math.sqrt(30))


def test_the_mean_covers_only_the_steps_that_all_runs_have(tmp_path):
    long = write_run(tmp_path / "a", 1, [math.nan, 0.0, 1.0, 2.0, 3.0])  # nothing known before step 20
    short = write_run(tmp_path / "b", 2, [2.0, 2.0, 3.0, 4.0])
    panels = group_runs([read_run(folder, "rollout/ep_rew_mean") for folder in (long, short)])
    (curve,) = panels["holdfast/TMaze-v0"]
    assert curve.steps[0] == 20 and curve.steps[-1] == 40
    np.testing.assert_allclose(curve.mean[[0, -1]], [1.0, 3.0])


def test_groups_are_what_differs_besides_the_seed_and_panels_are_environments(tmp_path):
    folders = [
        write_run(tmp_path / f"{env[9:]}-{core}-{seed}", seed, [0.0, 1.0], env=env, core=core, total_steps=len(env))
        for env in ("holdfast/TMaze-v0", "holdfast/RepeatFirstEasy-v0")
        for core in ("lstm", "gru")
        for seed in (1, 2)
    ]
    runs = [read_run(folder, "rollout/ep_rew_mean") for folder in folders]
    panels = group_runs(runs)
    assert list(panels) == ["holdfast/TMaze-v0", "holdfast/RepeatFirstEasy-v0"]
    assert [(curve.label, len(curve.runs)) for curve in panels["holdfast/TMaze-v0"]] == [("lstm", 2), ("gru", 2)]
    by_size = group_runs(runs, "core,hidden_size")["holdfast/TMaze-v0"]
    assert [curve.label for curve in by_size] == ["lstm, hidden_size 64", "gru, hidden_size 64"]
    assert len(group_runs(runs, "hidden_size")["holdfast/TMaze-v0"]) == 1


def test_a_png_is_written(tmp_path):
    folders = [write_run(tmp_path / str(seed), seed, [0.0, 0.5, seed / 3]) for seed in (1, 2, 3)]
    out = plot_runs(folders, tmp_path / "new folder" / "curve.png")
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_errors_say_what_is_wrong(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", 1, [0.0, 1.0])
    empty = write_run(tmp_path / "empty", 1, [math.nan])
    with pytest.raises(FileNotFoundError, match=r"is not a run folder: it has no progress\.csv"):
        plot_runs([tmp_path], tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"no metric 'loss'; it has update, steps, rollout/ep_rew_mean"):
        plot_runs([folder], tmp_path / "x.png", metric="loss")
    with pytest.raises(ValueError, match="no values of"):
        plot_runs([empty], tmp_path / "x.png")
    with pytest.raises(ValueError, match="no such setting"):
        plot_runs([folder], tmp_path / "x.png", group="color")
    with pytest.raises(ValueError, match="no runs"):
        plot_runs([], tmp_path / "x.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'holdfast\[plot\]'"):
        plot.plot_runs([folder], tmp_path / "x.png")
