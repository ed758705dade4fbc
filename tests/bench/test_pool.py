"""Workers: several runs per process, runs that fail, workers that die, and the end of the command."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.bench import pool as shared_gpu
from holdfast.bench.jobs import jobs
from holdfast.bench.pool import Pool
from holdfast.bench.suite import parse
from holdfast.runs import checkpoint

SIZES = {"hidden_size": 8, "num_envs": 8, "num_steps": 32, "epochs": 1, "minibatches": 2, "final_eval_episodes": 2}
DEADLY = """
import os, sys
def make(**kwargs):
    print("last words\\n    a line of code", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 9)
"""
DIES_UNDER_MPS = """
import os
import gymnasium
def make(**kwargs):
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        os.kill(os.getpid(), 11)
    return gymnasium.make("CartPole-v1", **kwargs)
"""


def tasks(*envs, steps=512):
    rows = [{"name": f"T{number}", "env": env} for number, env in enumerate(envs)]
    suite = parse({"name": "s", "steps": steps, "tasks": rows, "settings": SIZES}, "s")
    return jobs(suite, suite.tasks, device="cpu")


def test_a_run_that_fails_and_a_worker_that_dies_do_not_stop_the_others(tmp_path, monkeypatch):
    (tmp_path / "deadly_env.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    todo = tasks("deadly_env:make", "holdfast/NoSuchTask-v0", "holdfast/TMaze-v0", "holdfast/TMaze-v0")
    with closing(Pool(1, tmp_path / "runs", "cuda").run(todo)) as events:  # the runs themselves are on the CPU
        ended = {}
        for event in events:
            if event.kind in ("result", "error"):
                ended[event.job.task] = event
                # Whoever hears of a result can still lose it: the run is kept until the next event is asked for.
                assert event.kind == "error" or checkpoint.rolling(tmp_path / "runs" / event.job.id)
    assert list(ended) == ["T0", "T1", "T2", "T3"]
    assert ended["T0"].kind == "error" and ended["T0"].value == "the worker ended with signal SIGKILL: last words"
    assert ended["T1"].kind == "error" and "NoSuchTask" in ended["T1"].value
    assert ended["T2"].kind == "result" and ended["T2"].value["id"] == todo[2].id
    # The first was tried twice. On a GPU, a worker whose run failed is replaced. The next one trains all the rest.
    assert [ended[name].worker for name in ended] == [2, 3, 4, 4]
    # A finished run leaves no folder.
    assert not (tmp_path / "runs" / todo[2].id).exists()


def test_closing_the_pool_saves_the_runs(tmp_path):
    (job,) = tasks("holdfast/TMaze-v0", steps=10_000_000)
    pool = Pool(1, tmp_path, "cpu")
    with closing(pool.run([job])) as events:
        for event in events:
            if event.kind == "steps":
                break
    assert len(checkpoint.rolling(tmp_path / job.id)) == 1


def test_a_run_that_ends_when_the_time_is_over_gives_its_result_and_no_other_starts(tmp_path):
    pool, seen = Pool(1, tmp_path, "cpu"), []
    first, second = tasks("holdfast/TMaze-v0", "holdfast/TMaze-v0", steps=256)
    with closing(pool.run([first, second])) as events:
        for event in events:
            if event.kind != "tick":
                seen.append((event.kind, event.job.id))
            if event.kind == "steps":
                give_up = time.monotonic() + 60
                while pool._processes._lines.empty():  # the run is over, and nobody has read its result
                    assert time.monotonic() < give_up
                    time.sleep(0.01)
                pool.stop_after = 0.0
    assert seen == [("started", first.id), ("steps", first.id), ("result", first.id)]
    assert list(tmp_path.iterdir()) == []


# --- sharing a GPU, with a stand-in for NVIDIA's program --------------------------------------------------------------


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A program that writes down how it is called, and may refuse."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(f'#!/bin/sh\necho "$@" $(cat) >> {tmp_path}/calls\nexit ${{REFUSE:-0}}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return lambda: (tmp_path / "calls").read_text().split() if (tmp_path / "calls").exists() else []


def test_mps_is_started_on_a_gpu_and_ended(control, monkeypatch):
    monkeypatch.setattr(shared_gpu, "_FIRST_CLIENT", "raise SystemExit(0)")
    with shared_gpu.shared_gpu("cuda", mps=True) as environment:
        folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir() and control() == ["-d"]
    assert control() == ["-d", "quit"] and not folder.exists()


@pytest.mark.parametrize("why", ["not asked for", "cpu", "it refuses", "it serves nobody", "one runs"])
def test_workers_do_without_mps_where_it_is_not_wanted_or_does_not_work(control, monkeypatch, why):
    monkeypatch.setattr(shared_gpu, "_FIRST_CLIENT", f"raise SystemExit({int(why == 'it serves nobody')})")
    if why == "one runs":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "theirs")
    monkeypatch.setenv("REFUSE", str(int(why == "it refuses")))
    with shared_gpu.shared_gpu("cpu" if why == "cpu" else "cuda", mps=why != "not asked for") as environment:
        assert environment.get("CUDA_MPS_PIPE_DIRECTORY") == ("theirs" if why == "one runs" else None)
        assert environment["OMP_NUM_THREADS"] == "1"
    assert control() == {"it refuses": ["-d"], "it serves nobody": ["-d", "quit"]}.get(why, [])


def test_a_run_that_fails_under_mps_is_tried_again_without_it_after_the_others(tmp_path, control, monkeypatch):
    monkeypatch.setattr(shared_gpu, "_FIRST_CLIENT", "raise SystemExit(0)")
    (tmp_path / "company.py").write_text(DIES_UNDER_MPS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    todo = tasks("company:make", "holdfast/NoSuchTask-v0")
    pool, seen = Pool(2, tmp_path / "runs", "cuda", mps=True), []
    with closing(pool.run(todo)) as events:
        for event in events:
            if event.kind in ("again", "result", "error"):
                seen.append((pool.uses_mps, event.job.task, event.kind))
                if event.kind == "again":
                    assert {"T0": "SIGSEGV", "T1": "NoSuchTask"}[event.job.task] in event.value
    assert sorted(seen[:2]) == [(True, "T0", "again"), (True, "T1", "again")]
    assert sorted(seen[2:]) == [(False, "T0", "result"), (False, "T1", "error")]
    assert control() == ["-d", "quit"]
