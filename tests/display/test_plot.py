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


def write_evaluated(
    folder, seed, values, evaluations, actions=("correlated noise", "white noise"), result=None, **config
):
    """A run with evaluations of four episodes: (update, mean, standard error)."""
    log = RunLog(folder, tensorboard=False, wandb=False, config={})
    found = {update: (mean, error, 4) for update, mean, error in evaluations}
    for i, value in enumerate(values, 1):
        numbers = zip(("mean_return", "std_error", "episodes"), found.get(i, (math.nan,) * 3))
        evaluated = {f"eval/{name}": number for name, number in numbers}
        log.write({"update": i, "steps": i * 10, "rollout/ep_rew_mean": value, **evaluated, "time/fps": 1.0}, i * 10)
    log.close()
    (folder / "config.json").write_text(json.dumps({"env": "Pendulum-v1", "core": "gru", "seed": seed, **config}))
    (folder / "meta.json").write_text(json.dumps({"actions": dict(zip(("training", "evaluation"), actions))}))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def axes_of(monkeypatch, folders, **options):
    """The panels of the figure that `plot_runs` draws."""
    drawn = []
    monkeypatch.setattr(plot, "save_figure", lambda figure, out, **options: drawn.append(figure))
    plot_runs(folders, "unused.png", **options)
    return drawn[0].axes


def texts_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_training_episodes_and_evaluations_are_two_lines_that_say_how_actions_were_drawn(tmp_path, monkeypatch):
    result = {"mean_return": 8.0, "std_error": 0.5, "episodes": 100, "steps": 40}
    folder = write_evaluated(tmp_path / "a", 1, [0, 1, 2, 3], [(2, 4.0, 1.0), (4, 6.0, 1.0)], result=result)
    (axes,) = axes_of(monkeypatch, [folder])
    assert texts_of(axes) == ["training episodes, correlated noise", "evaluation, white noise"]
    (bars,) = axes.collections
    # Four episodes: t is 3.182. The end is the result, in place of the last evaluation: 100 episodes, 1.96.
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    np.testing.assert_allclose(ends, [[4 - 3.182, 4 + 3.182], [8 - 0.98, 8 + 0.98]])
    (old,) = axes_of(monkeypatch, [write_run(tmp_path / "old", 1, [0.0, 1.0])])
    assert old.get_legend() is None and old.get_ylabel() == "mean return"


def test_groups_are_compared_by_their_evaluations_if_these_draw_actions_in_another_way(tmp_path, monkeypatch):
    evaluations = [(1, 4.0, 1.0), (2, 5.0, 1.0), (3, 6.0, 1.0)]
    cores = ("gru", "lstm")
    noisy = [write_evaluated(tmp_path / core, 1, [0, 1, 2], evaluations, core=core) for core in cores]
    (axes,) = axes_of(monkeypatch, noisy)
    assert axes.get_ylabel() == "mean return (evaluation, white noise)" and texts_of(axes) == ["gru", "lstm"]
    few = write_evaluated(tmp_path / "few", 1, [0, 1, 2], evaluations[:2], core="lru")
    (axes,) = axes_of(monkeypatch, [*noisy, few])
    assert axes.get_ylabel() == "mean return (training episodes, correlated noise)"
    same = [
        write_evaluated(tmp_path / f"same-{core}", 1, [0, 1, 2], evaluations, ("a", "a"), core=core) for core in cores
    ]
    assert axes_of(monkeypatch, same)[0].get_ylabel() == "mean return (training episodes)"
    asked = axes_of(monkeypatch, same, metric="eval/mean_return")[0]
    assert asked.get_ylabel() == "mean return (evaluation)"


def test_many_panels_are_drawn_in_rows_of_four(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / str(i), 1, [0.0, 1.0], env=f"Env-v{i}") for i in range(5)]
    shown = [axes for axes in axes_of(monkeypatch, folders) if axes.axison]
    assert len(shown) == 5 and shown[0].get_subplotspec().get_gridspec().get_geometry() == (2, 4)


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


def test_two_seeds_give_their_range_and_no_interval():
    mean, interval = confidence_interval(np.array([[1.0, 4.0], [3.0, 2.0]]))
    np.testing.assert_array_equal(mean, [2.0, 3.0])
    np.testing.assert_array_equal(interval, [[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("aggregate", ["mean", "iqm"])
def test_the_band_of_two_runs_is_their_range_however_they_are_averaged(tmp_path, aggregate):
    runs = [
        read_run(write_run(tmp_path / str(seed), seed, [seed, 2.0 * seed]), "rollout/ep_rew_mean") for seed in (1, 3)
    ]
    (curve,) = group_runs(runs, aggregate=aggregate)["holdfast/TMaze-v0"]
    np.testing.assert_allclose(curve.interval[:, -1], [2.0, 6.0])


def lines_of(folders, env="holdfast/TMaze-v0", group="auto"):
    """The labels of the lines that runs are drawn as."""
    runs = [read_run(folder, "rollout/ep_rew_mean") for folder in folders]
    return [curve.label for curve in group_runs(runs, group)[env]]


def test_labels_show_the_settings_that_differ_between_the_lines_of_a_panel(tmp_path):
    settings = [dict(learning_rate=1e-3, gamma=0.9, epochs=4), dict(learning_rate=2e-3, gamma=0.9, epochs=8)]
    folders = [write_run(tmp_path / f"a{i}", 1, [0.0, 1.0], **each, eval_every=i) for i, each in enumerate(settings)]
    folders.append(write_run(tmp_path / "b", 1, [0.0, 1.0], **settings[0], env="holdfast/RepeatFirstEasy-v0"))
    assert lines_of(folders) == ["learning_rate 0.001, epochs 4", "learning_rate 0.002, epochs 8"]
    assert lines_of(folders, "holdfast/RepeatFirstEasy-v0") == ["lstm"]


def test_labels_begin_with_the_task_and_the_network_and_end_with_dots_if_more_settings_differ(tmp_path):
    one = dict(total_steps=100, num_envs=8, gae_lambda=0.9, gamma=0.9, learning_rate=1e-3, mask_velocity=False)
    other = dict(total_steps=200, num_envs=16, gae_lambda=0.8, gamma=0.8, learning_rate=2e-3, mask_velocity=True)
    folders = [write_run(tmp_path / "a", 1, [0.0, 1.0], **one), write_run(tmp_path / "b", 1, [0.0, 1.0], **other)]
    assert lines_of(folders) == [
        "no mask_velocity, gae_lambda 0.9, gamma 0.9, learning_rate 0.001",
        "mask_velocity, gae_lambda 0.8, gamma 0.8, learning_rate 0.002",
    ]
    folders.append(write_run(tmp_path / "c", 1, [0.0, 1.0], **other, core="gru"))
    assert lines_of(folders)[2] == "mask_velocity, gru, gae_lambda 0.8, gamma 0.8, …"


def test_labels_tell_all_lines_apart_also_by_later_settings(tmp_path):
    names = ("hidden_size", "learning_rate", "gamma", "gae_lambda", "clip_range")
    first = write_run(tmp_path / "first", 1, [0.0, 1.0], **dict.fromkeys(names, 1))
    folders = [first, *(write_run(tmp_path / n, 1, [0.0, 1.0], **{**dict.fromkeys(names, 1), n: 2}) for n in names)]
    assert len(set(lines_of(folders))) == 6


def test_labels_have_the_number_of_steps_only_if_nothing_else_tells_lines_apart(tmp_path):
    folders = [
        write_run(tmp_path / f"{core}{steps}", 1, [0.0, 1.0], core=core, total_steps=steps)
        for core, steps in (("lstm", 10), ("gru", 20))
    ]
    assert lines_of(folders) == ["lstm", "gru"]
    folders.append(write_run(tmp_path / "long", 1, [0.0, 1.0], core="gru", total_steps=30))
    assert lines_of(folders) == ["lstm, total_steps 10", "gru, total_steps 20", "gru, total_steps 30"]


def test_labels_name_a_policy_of_the_users_own_and_the_core_of_a_line_without_one(tmp_path):
    policies = (None, "own-policy:Transformer", "mine:Net")
    folders = [write_run(tmp_path / f"p{i}", 1, [0.0, 1.0], policy=policy) for i, policy in enumerate(policies)]
    assert lines_of(folders) == ["lstm", "Transformer", "mine:Net"]
    assert lines_of(folders, group="core") == ["lstm", "Transformer", "mine:Net"], "their core is not the LSTM"
    assert lines_of(folders, group="policy") == ["Holdfast's policy", "Transformer", "mine:Net"]
    assert lines_of(folders[1:2]) == ["Transformer"]
    folders.append(write_run(tmp_path / "gru", 1, [0.0, 1.0], policy="mine:Net", core="gru"))
    assert lines_of(folders) == ["lstm", "Transformer", "mine:Net, lstm", "mine:Net, gru"], "it reads the core itself"


def test_labels_name_the_arguments_of_the_environment_that_differ(tmp_path):
    arguments = ({}, {"length": 40, "size": 3}, {"length": 80})
    folders = [write_run(tmp_path / f"e{i}", 1, [0.0, 1.0], env_kwargs=each) for i, each in enumerate(arguments)]
    assert lines_of(folders) == ["length default, size default", "length 40, size 3", "length 80, size default"]


def test_labels_list_several_values_as_a_flag_does(tmp_path):
    seen = [["obs"], ["obs", "prev_action"]]
    folders = [write_run(tmp_path / f"r{i}", 1, [0.0, 1.0], inputs=inputs) for i, inputs in enumerate(seen)]
    panels = group_runs([read_run(folder, "rollout/ep_rew_mean") for folder in folders])
    assert [curve.label for curve in panels["holdfast/TMaze-v0"]] == ["inputs obs", "inputs obs prev_action"]


def test_folders_without_data_are_left_out_and_named(tmp_path):
    good = write_run(tmp_path / "good", 1, [0.0, 1.0])
    empty = write_run(tmp_path / "empty", 2, [math.nan])
    (tmp_path / "none").mkdir()
    said = []
    plot_runs([empty, good, tmp_path / "none"], tmp_path / "curves.png", notify=said.append)
    assert said == [
        f"left out: {empty} has no values of 'rollout/ep_rew_mean' yet",
        f"left out: {tmp_path / 'none'} is not a run folder: it has no progress.csv",
    ]
    with pytest.raises(ValueError, match=r"empty has no values .*; and 1 other folders have nothing to draw either"):
        plot_runs([empty, tmp_path / "none"], tmp_path / "curves.png")


def drawn(folders, monkeypatch, **options):
    """The axes of a figure of runs."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plot_runs(folders, "unused/curves.png", **options)
    return figures[0].axes


def test_the_legend_stands_below_the_curves_and_lines_differ_without_color(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [
        write_run(tmp_path / f"{core}{seed}", seed, [0.0, 1.0, 2.0], core=core)
        for core in ("lstm", "gru", "ffm")
        for seed in (1, 2)
    ]
    (axes,) = drawn(folders, monkeypatch)
    axes.figure.canvas.draw()
    assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lstm", "gru", "ffm"]
    lines = [line for line in axes.get_lines() if line.get_label() in ("lstm", "gru", "ffm")]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 3
    assert axes.get_title() == "TMaze-v0, 2 seeds\nmean, range"


def test_one_curve_needs_no_legend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (axes,) = drawn([write_run(tmp_path / "a", 7, [0.0, 1.0])], monkeypatch)
    assert axes.get_legend() is None and axes.get_title() == "TMaze-v0, lstm, seed 7"


def test_the_title_counts_seeds_and_says_if_runs_repeat_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [write_run(tmp_path / f"r{i}", seed, [0.0, 1.0]) for i, seed in enumerate((1, 1, 2))]
    (axes,) = drawn(folders[:2], monkeypatch)
    assert axes.get_title() == "TMaze-v0, lstm, 2 runs of 1 seed\nmean, range"
    (axes,) = drawn(folders, monkeypatch)
    assert axes.get_title() == "TMaze-v0, lstm, 3 runs of 2 seeds\nmean, 95% interval"
    others = [write_run(tmp_path / f"g{seed}", seed, [0.0, 1.0], core="gru") for seed in (1, 2)]
    (axes,) = drawn([*folders[:2], *others], monkeypatch)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lstm (2 runs of 1 seed)", "gru (2 seeds)"]


def test_the_title_says_what_the_bands_of_few_and_of_many_runs_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [write_run(tmp_path / f"r{seed}", seed, [0.0, 1.0]) for seed in (1, 2, 3, 4)]
    title = drawn(folders[:3], monkeypatch, aggregate="iqm")[0].get_title()
    assert title == "TMaze-v0, lstm, 3 seeds\nmean, range", "a bootstrap of three gives nothing else"
    title = drawn(folders, monkeypatch, aggregate="iqm")[0].get_title()
    assert title == "TMaze-v0, lstm, 4 seeds\ninterquartile mean, 95% interval"
    others = [write_run(tmp_path / f"g{seed}", seed, [0.0, 1.0], core="gru") for seed in (1, 2)]
    assert drawn([*folders, *others], monkeypatch)[0].get_title() == "TMaze-v0\nmean, 95% interval, range of 2 runs"


def test_a_legend_of_many_lines_leaves_the_curves_their_room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [write_run(tmp_path / f"r{i}", 1, [0.0, 1.0], learning_rate=i, gamma=i, clip_range=i) for i in range(30)]
    (axes,) = drawn(folders, monkeypatch)
    axes.figure.canvas.draw()
    size = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    assert size.width > 4 and size.height > 3
    assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0


def test_labels_are_the_names_that_runs_were_given(tmp_path):
    folders = [
        write_run(tmp_path / f"{name}{seed}", seed, [1, 2], name=f"{name}-seed{seed}", num_envs=envs, learning_rate=0.1)
        for name, envs in (("baseline", 8), ("tuned", 16))
        for seed in (1, 2)
    ]
    assert lines_of(folders) == ["baseline", "tuned"]


def test_labels_show_automatic_sizes_only_if_nothing_else_tells_lines_apart(tmp_path):
    some = [write_run(tmp_path / str(steps), 1, [1, 2], num_envs=steps // 10, total_steps=steps) for steps in (80, 160)]
    assert lines_of(some) == ["total_steps 80", "total_steps 160"]
    one_named = [
        write_run(tmp_path / core, 1, [1, 2], core=core, name=name) for core, name in (("gru", "a"), ("lstm", None))
    ]
    assert lines_of(one_named) == ["gru", "lstm"]


def test_a_name_from_a_file_is_no_formula(tmp_path):
    folders = [write_run(tmp_path / core, 1, [1, 2], core=core) for core in ("$\\frac{", "$x$")]
    assert plot_runs(folders, tmp_path / "curves.png").stat().st_size


def test_a_record_without_steps_is_named(tmp_path):
    run = write_run(tmp_path / "run", 1, [1, 2])
    (run / "progress.csv").write_text("update,rollout/ep_rew_mean\n1,2\n")
    with pytest.raises(ValueError, match=r"progress\.csv is damaged: a row has no number of steps, or no number as"):
        plot_runs([run], tmp_path / "curves.png")
