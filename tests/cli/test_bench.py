"""`holdfast bench`: runs, table and page from one command, which can be killed and repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.bench.pool import Event, Pool
from holdfast.runs.lock import RunLock

SUITE = """
name = "mine"
cores = ["gru"]
device = "cpu"
steps = 25_600  # one update of the first task, a hundred of the second
tasks = [
    { name = "Short", env = "holdfast/TMaze-v0", settings = { num_envs = 800 }, low = 0, high = 1, published = { theirs = 0.5 } },
    { name = "Long", env = "holdfast/TMaze-v0", low = 0, high = 1, target = 2.0 },
]

[settings]
hidden_size = 8
num_envs = 8
num_steps = 32
epochs = 1
minibatches = 2
final_eval_episodes = 4
env_kwargs = { length = 3 }

[published.theirs]
name = "theirs"
source = "a table"
"""


def test_the_command_of_the_docs_makes_results_table_and_page(run, folder, capsys):
    command = str.split(
        "bench popgym --device cpu --steps 1_000 --tasks RepeatFirstEasy RepeatPreviousEasy --cores gru none --jobs 1"
    )
    assert run(*command) == 0
    said = capsys.readouterr().out
    assert "popgym: 4 runs, 1 at a time" in said and "4 of 4 runs  " in said
    out = folder / "runs" / "bench" / "popgym"
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert sorted((row["task"], row["core"], row["seed"], row["steps"]) for row in rows) == [
        (task, core, 1, 1000) for task in ("RepeatFirstEasy", "RepeatPreviousEasy") for core in ("gru", "none")
    ]
    assert "| RepeatPreviousEasy | 1,000 | -0.500 | 1.000 | 1.000 | " in (out / "table.md").read_text()
    page = (out / "index.html").read_text()
    assert page.startswith("<!doctype html>") and "RepeatFirstEasy" in page

    before = (out / "results.jsonl").read_bytes()
    (out / "index.html").unlink()
    assert run(*command) == 0  # everything is finished: nothing runs, and the page is there again
    assert "4 runs, 4 of them finished before" in capsys.readouterr().out
    assert (out / "results.jsonl").read_bytes() == before and (out / "index.html").read_text() == page
    assert run("bench", "popgym", "--report", "--steps", 1000, "--quiet") == 0
    assert (out / "index.html").read_text() == page


def test_a_killed_command_goes_on_where_it_was(run, folder, capsys):
    Path("mine.toml").write_text(SUITE)
    out = folder / "runs" / "bench" / "mine"
    results = out / "results.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    first = [sys.executable, "-m", "holdfast", "bench", "mine.toml", "--jobs", "1"]
    with subprocess.Popen(first, env=environment, stdout=subprocess.DEVNULL) as command:
        give_up = time.monotonic() + 120
        while not (results.exists() and list((out / "runs").glob("Long-*/progress.csv"))):
            assert time.monotonic() < give_up and command.poll() is None
            time.sleep(0.02)
        command.kill()
    before = results.read_bytes()
    assert [json.loads(line)["task"] for line in before.splitlines()] == ["Short"]
    results.write_bytes(before + b'{"id": "torn')

    assert run("bench", "mine.toml", "--jobs", 1) == 0
    said = capsys.readouterr().out
    assert "mine: 2 runs, 1 of them finished before, 1 at a time on cpu" in said
    assert f"1 damaged line is ignored in {results.relative_to(folder)}" in said
    after = results.read_bytes()
    assert after.startswith(before)
    _, long = (json.loads(line) for line in after.splitlines() if b"torn" not in line)
    assert (long["task"], long["trained_steps"]) == ("Long", 25_600)
    # It went on from the checkpoint that its worker saved: the whole curve is there, and this process trained a part of it.
    assert long["curve"][0][0] < 1000 and long["curve"][-1][0] == 25_600
    assert long["phases"]["first update"] + long["phases"]["other updates"] < long["seconds"]
    table = (out / "table.md").read_text()
    assert "| Short | 25,600 | 0.000 |  | 0.500 | " in table and "✗ −" in table
    assert list((out / "runs").iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_stopped_saves_its_runs_first(folder, number, code):
    Path("mine.toml").write_text(SUITE.replace("25_600", "256_000_000"))
    runs = folder / "runs" / "bench" / "mine" / "runs"
    command = [sys.executable, "-m", "holdfast", "bench", "mine.toml", "--jobs", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as stopped:
        give_up = time.monotonic() + 120
        while len(list(runs.glob("*/progress.csv"))) < 2:
            assert time.monotonic() < give_up and stopped.poll() is None
            time.sleep(0.02)
        stopped.send_signal(number)  # to the command alone, which tells its workers
        out, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == code
    assert out.splitlines()[-1] == "stopped; run the same command again to continue"
    assert len(list(runs.glob("*/checkpoints/update_*.pt"))) == 2


def test_a_command_with_a_time_limit_saves_what_runs_and_goes_on_when_it_is_repeated(run, folder, capsys, monkeypatch):
    def out_of_time(self, jobs):
        for event in all_events(self, jobs):
            yield event
            if event.kind == "steps":
                self.stop_after = 0.0

    all_events = Pool.run
    # Forty updates of the first task, so that it is not finished before the command stops; one of the second.
    suite = SUITE.replace("25_600", "10_240").replace('"Long",', '"Long", steps = 256,')
    Path("mine.toml").write_text(suite)
    command = ("bench", "mine.toml", "--jobs", 1, "--set", "gamma=0.9", "learning_rate=1e-3", "num_envs=8")
    with monkeypatch.context() as short:
        short.setattr(Pool, "run", out_of_time)
        assert run(*command, "--stop-after", 3600) == 0
    assert "s; 2 of 2 runs are left; run the same command again to continue" in capsys.readouterr().out
    out = folder / "runs" / "bench" / "mine"
    (begun,) = (out / "runs").iterdir()  # the other one was not started
    assert begun.name.startswith("Short-gru-seed1-gamma_0.9_") and len(list(begun.glob("checkpoints/*.pt"))) == 1

    assert run(*command) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["task"] for row in rows] == ["Short", "Long"]
    assert {row["setting"] for row in rows} == {"gamma=0.9 learning_rate=0.001 num_envs=8"}
    phases = rows[0]["phases"]
    assert phases["first update"] + phases["other updates"] < rows[0]["seconds"]  # it went on
    assert [row["trained_steps"] for row in rows] == [10_240, 256]
    assert all(row["config"]["gamma"] == 0.9 for row in rows)
    for name in ("table.md", "index.html"):
        text = (out / name).read_text()
        assert "With gamma=0.9 learning_rate=0.001 num_envs=8" in text
        assert "hidden_size 8, num_envs 8, num_steps 32, learning_rate 0.001, gamma 0.9, max_grad_norm 0.5" in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("popgym --set gamma --device cpu", "--set 'gamma': expected name=value, such as hidden_size=256"),
        ("popgym --set gama=1 --device cpu", "--set: unknown settings ['gama']"),
        ("popgym --stop-after 0", "--stop-after must be more than 0 seconds, got 0"),
        ("popgim", "holdfast bench: no suite 'popgim'; did you mean popgym?"),
        ("", "holdfast bench: SUITE is missing; see holdfast bench --help"),
        ("popgym --tasks RepeatFirstEsy", "has no task 'RepeatFirstEsy'; did you mean RepeatFirstEasy?"),
        ("popgym --cores grue --device cpu", "--core grue must be one of lstm, gru"),
        ("popgym --seeds 0", "--seeds must be at least 1, got 0"),
        ("popgym --steps many", "--steps: 'many' is not an integer"),
        ("popgym --device tpu", "device 'tpu': Holdfast runs on CPUs and NVIDIA GPUs"),
        ("popgym --first-seed -1 --device cpu", "--first-seed (in a suite first_seed) must be at least 0, got -1"),
        ("out-of-the-box --tuned", "suite out-of-the-box has no tuned settings for these tasks; leave out --tuned"),
        ("popgym --report --out empty", "empty holds no results of this suite and number of steps"),
        ("popgym --out file", "file cannot be written"),
        ("broken.toml", "broken.toml: unknown key 'task'; did you mean tasks?"),
    ],
)
def test_a_mistake_is_one_line(run, folder, capsys, flags, says):
    Path("file").write_text("")
    Path("broken.toml").write_text('name = "b"\ntask = []\n')
    assert run("bench", *flags.split()) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("CartPole-v7", "no environment 'CartPole-v7'; did you mean CartPole-v"),
        ("holdfast/TMase-v0", "no environment 'holdfast/TMase-v0'; did you mean holdfast/TMaze-v0"),
        ("nowhere:MyEnv", "'nowhere:MyEnv': "),
        ("bench_mazes:Mase", "no environment 'Mase' in bench_mazes"),
    ],
)
def test_an_environment_that_does_not_exist_is_named_before_anything_trains(
    run, folder, capsys, monkeypatch, env, says
):
    monkeypatch.setattr(Pool, "run", lambda *_: pytest.fail("a run was started"))
    Path("bench_mazes.py").write_text("class Maze:\n    pass\n")
    tasks = [{"name": "Good", "env": "holdfast/TMaze-v0"}, {"name": "Bad", "env": env}]
    Path("s.json").write_text(json.dumps(dict(name="s", steps=32, tasks=tasks)))
    assert run("bench", "s.json", "--device", "cpu", "--allow-imports") == 2
    said = capsys.readouterr().err
    assert said.startswith("holdfast bench: s.json, task Bad: ") and says in said and said.count("\n") == 1
    assert not (folder / "runs").exists()


def test_a_module_of_a_suite_is_not_imported_to_check_its_environments(run, folder, capsys):
    Path("loud.py").write_text("raise SystemExit('imported')\n")
    Path("s.json").write_text(json.dumps(dict(name="s", steps=32, tasks=[{"name": "A", "env": "loud:Maze"}])))
    assert run("bench", "s.json", "--device", "cpu") == 2
    assert "add --allow-imports" in capsys.readouterr().err


def test_a_report_leaves_out_results_of_the_environment_that_a_task_had_before(run, folder, capsys):
    settings = dict(hidden_size=4, num_envs=4, num_steps=16, minibatches=1, epochs=1, final_eval_episodes=1)
    suite = {"name": "s", "steps": 64, "settings": settings, "device": "cpu"}

    def bench(length, *flags):
        task = {"name": "T", "env": "holdfast/TMaze-v0", "settings": {"env_kwargs": {"length": length}}}
        Path("s.json").write_text(json.dumps({**suite, "tasks": [task]}))
        return run("bench", "s.json", "--jobs", 1, "--quiet", *flags)

    assert bench(3) == 0
    capsys.readouterr()
    assert bench(4, "--report") == 2
    said = capsys.readouterr().err
    assert "holds no results of this suite and number of steps; 1 out of date (the task has another environment" in said
    assert bench(4, "--first-seed", 2) == 0
    assert "results.jsonl; 1 out of date" in capsys.readouterr().out
    assert "runs: 1;" in Path("runs/bench/s/table.md").read_text()
    assert bench(3, "--report", "--figures") == 0 and "runs: 1;" in Path("runs/bench/s/table.md").read_text()
    out = Path("runs/bench/s")
    assert (out / "curves.png").read_bytes()[1:4] == b"PNG" and (out / "curves.pdf").read_bytes()[:4] == b"%PDF"


def test_plot_draws_the_results_of_a_bench(run, folder, capsys):
    facts = dict(task="T", core="gru", steps=8, setting="default", final=1.0, curve=[[4, 0.0], [8, 1.0]])
    lines = [json.dumps({"id": f"a{seed}", "seed": seed, **facts}) for seed in (1, 2)]
    Path("results.jsonl").write_text("\n".join([*lines, "torn"]))
    assert run("plot", "results.jsonl", "-o", "curves.pdf") == 0 and Path("curves.pdf").read_bytes()[:4] == b"%PDF"
    assert run("plot", "results.jsonl", "runs") == 2
    assert "results.jsonl holds results of a bench: draw it without run folders" in capsys.readouterr().err
    Path("empty.jsonl").touch()
    assert run("plot", "empty.jsonl") == 2
    assert "there is no finished run with a curve in these results" in capsys.readouterr().err


def test_a_folder_takes_one_command_at_a_time(run, folder, capsys):
    lock = RunLock(folder / "out")
    lock.claim()
    assert run("bench", "popgym", "--report", "--out", "out") == 2
    said = capsys.readouterr().err
    assert f"is in use by another run (process {os.getpid()}" in said
    assert said.endswith("wait for that command, or choose another folder with --out\n")
    lock.release()


def test_runs_that_fail_are_named_and_tried_again(run, folder, capsys, monkeypatch):
    given = []

    def fail(self, jobs):
        for job in given.append(jobs) or jobs:
            yield Event("started", job, 1)
            yield Event("error", job, 1, "ValueError: no luck")

    monkeypatch.setattr(Pool, "run", fail)
    Path("mine.toml").write_text(SUITE)
    for _ in range(2):
        assert run("bench", "mine.toml") == 2
        captured = capsys.readouterr()
        assert "Short gru seed 1  failed: ValueError: no luck" in captured.out
        assert captured.err == (
            "holdfast bench: 2 of 2 runs failed (Short gru seed 1: ValueError: no luck); run the same command again to retry them\n"
        )
    assert [job.task for job in given[1]] == ["Short", "Long"]


def test_results_that_cannot_be_written_end_in_one_line_and_the_same_command_goes_on(run, folder, capsys, monkeypatch):
    from holdfast.bench import results

    settings = dict(hidden_size=4, num_envs=4, num_steps=8, minibatches=1, epochs=1, final_eval_episodes=1)
    task = {"name": "A", "env": "holdfast/TMaze-v0", "settings": {"env_kwargs": {"length": 3}}}
    (folder / "s.json").write_text(json.dumps(dict(name="s", steps=32, settings=settings, tasks=[task])))
    command = ("bench", "s.json", "--device", "cpu", "--jobs", 1, "--quiet", "--out", "out")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(results, "append", full)
        assert run(*command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "out cannot be written" in line and "No space left" in line and "then run the same command again" in line
    assert len(list((folder / "out" / "runs").iterdir())) == 1  # the run, with its last checkpoint
    assert run(*command) == 0 and len(results.read(folder / "out" / "results.jsonl")[0]) == 1
