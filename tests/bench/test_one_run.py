"""One run of a suite: its statistic, and that a run in two parts is the run it would have been."""

from __future__ import annotations

import pytest

from holdfast.bench import results
from holdfast.bench.jobs import jobs
from holdfast.bench.one_run import EPISODES, MEAN_RETURN, train
from holdfast.bench.suite import parse
from holdfast.rollout.collector import Collector
from holdfast.runs import checkpoint
from holdfast.runs.log import read_progress
from holdfast.training.evaluation import EvalResult
from holdfast.training.trainer import Trainer

TIMES = ("seconds", "wall_seconds", "steps_per_second", "phases")


def job(seed=3, steps=2048, **settings):
    sizes = {"hidden_size": 8, "num_envs": 8, "num_steps": 32, "epochs": 1, "minibatches": 2, "final_eval_episodes": 8}
    task = {"name": "T", "env": "holdfast/TMaze-v0", "settings": {"env_kwargs": {"length": 3}}}
    suite = parse({"name": "s", "tasks": [task], "settings": {**sizes, **settings}, "deterministic": True}, "s")
    (made,) = jobs(suite, suite.tasks, device="cpu", seeds=(seed,), steps=steps)
    return made


@pytest.mark.parametrize("repository", [False, True], ids=["in no repository", "in another one"])
def test_the_result_says_what_was_run_and_how(tmp_path, monkeypatch, repository):
    if not repository:
        monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_COMMIT", "1234abcd")
    found = train(job(), tmp_path / "run")
    assert found["commit"] == "1234abcd"
    assert (found["task"], found["core"], found["seed"], found["steps"]) == ("T", "gru", 3, 2048)
    assert found["id"] == job().id
    assert found["engine"].keys() == {"rollout", "update"} and found["device"]
    assert found["config"]["num_envs"] == 8 and found["config"]["env_kwargs"] == {"length": 3}
    assert "run_dir" not in found["config"]
    assert found["steps_per_second"] == pytest.approx(2048 / found["seconds"], rel=0.2)
    assert 0 < found["seconds"] < found["wall_seconds"]
    assert {"final", "final_std_error", "final_deterministic", "packages"} <= found.keys()


def test_the_statistic_is_the_best_mean_return_of_an_update(tmp_path):
    means, counts = [], []
    found = train(job(seed=5), tmp_path / "run")
    for line in read_progress(tmp_path / "run"):
        means.append(float(line[MEAN_RETURN]))
        counts.append(int(line[EPISODES]))
        ended = int(line["rollout/episodes"])
        if ended < 100:  # then it is the mean of the last 100
            assert means[-1] == float(line["rollout/ep_rew_mean"])
    counted = [value for value, count in zip(means, counts) if count >= 100]
    assert len(counted) < len(means) and counts[0] < 100
    assert found["best"] == max(counted)
    steps = [256 * (1 + number) for number, value in enumerate(means) if value == found["best"]]
    assert found["best_at"] in steps
    assert [point[0] for point in found["curve"]] == [256 * (1 + number) for number in range(8)]
    assert found["curve"][-1][1] == pytest.approx(means[-1], rel=1e-4)


def test_with_a_hundred_episodes_in_an_update_the_mean_is_over_all_of_them(tmp_path):
    train(job(num_envs=64, num_steps=64, steps=4096), tmp_path / "run")
    (line,) = read_progress(tmp_path / "run")
    assert int(line[EPISODES]) == int(line["rollout/episodes"]) > 100
    assert float(line[MEAN_RETURN]) != float(line["rollout/ep_rew_mean"])


def test_a_run_that_is_stopped_goes_on_as_if_it_had_never_stopped(tmp_path):
    whole = train(job(seed=7), tmp_path / "whole")
    assert train(job(seed=7), tmp_path / "parts", lambda steps: steps < 1024) is None
    assert len(read_progress(tmp_path / "parts")) == 4
    seen = []
    rest = train(job(seed=7), tmp_path / "parts", lambda steps: not seen.append(steps))
    assert seen == [1280, 1536, 1792, 2048]
    assert {k: v for k, v in rest.items() if k not in TIMES} == {k: v for k, v in whole.items() if k not in TIMES}


def test_a_run_is_saved_now_and_then_and_not_after_every_update(tmp_path):
    saved = []

    def look(steps):
        saved.append([path.name for path in checkpoint.rolling(tmp_path / "run")])
        return True

    train(job(), tmp_path / "run", look, checkpoint_seconds=0.0)
    assert saved == [[], *([f"update_{update:08d}.pt"] for update in range(1, 8))]
    train(job(), tmp_path / "never", checkpoint_seconds=1e9)
    assert [path.name for path in checkpoint.rolling(tmp_path / "never")] == ["update_00000008.pt"]


def test_saving_now_and_then_leaves_the_settings_of_the_run_alone(tmp_path):
    train(job(), tmp_path / "run", lambda steps: steps < 1024, checkpoint_seconds=0.0)
    (file,) = checkpoint.rolling(tmp_path / "run")
    assert file.name == "update_00000004.pt" and checkpoint.load(file)["config"]["checkpoint_every"] == 0


def test_a_watched_run_may_overlap_rollouts_and_updates(tmp_path, monkeypatch):
    asked = []
    may_go_ahead = Trainer._may_prefetch
    monkeypatch.setattr(Collector, "prefetches", True)  # as on a GPU
    monkeypatch.setattr(Trainer, "_may_prefetch", lambda self: asked.append(may_go_ahead(self)) or asked[-1])
    train(job(), tmp_path / "run", checkpoint_seconds=0.0)
    assert asked == [True] * 6 + [False], "not in the last update; the first is checked by replay, and nothing is asked"


def test_a_damaged_checkpoint_starts_the_run_again(tmp_path):
    whole = train(job(), tmp_path / "whole")
    train(job(), tmp_path / "run", lambda steps: steps < 1024)
    (file,) = checkpoint.rolling(tmp_path / "run")
    file.write_bytes(file.read_bytes()[:-9])
    again = train(job(), tmp_path / "run")
    assert (again["best"], again["final"], again["curve"]) == (whole["best"], whole["final"], whole["curve"])


@pytest.mark.parametrize(
    ("returns", "says"),
    [([], "no episode of the evaluation ended; give"), ([float("inf")], "the mean return of the evaluation is inf")],
)
def test_a_run_without_a_return_to_report_has_failed(tmp_path, monkeypatch, returns, says):
    monkeypatch.setattr(Trainer, "evaluate", lambda *_, **__: EvalResult.of(returns, [1] * len(returns)))
    with pytest.raises(RuntimeError, match=says):
        train(job(steps=256), tmp_path / "run")


def test_a_result_in_which_only_the_most_likely_actions_end_no_episode_can_be_read_back(tmp_path, monkeypatch):
    def evaluate(self, episodes, deterministic=False):
        return EvalResult.of([], []) if deterministic else EvalResult.of([0.5, 1.5], [3, 3])

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    found = train(job(steps=256), tmp_path / "run")
    assert (found["final"], found["final_deterministic"]) == (1.0, None)
    results.append(tmp_path / "results.jsonl", found)
    assert results.read(tmp_path / "results.jsonl")[1] == 0
