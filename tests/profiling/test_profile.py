"""`--profile`: the spans of an update and their time, a trace that stays small, and a run that is not changed by it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
import rank_jobs
from holdfast.cli import main
from holdfast.kernels.cpu import recurrence as native
from holdfast.profiling import profile, recording
from holdfast.spans import span
from rank_jobs import run_ranks

SMALL = dict(
    env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=8, num_envs=4, num_steps=8, minibatches=2, epochs=2,
    total_steps=4 * 8 * 12, checkpoint_every=3, final_eval_episodes=2, learning_rate=0.01, tensorboard=False,
    quiet=True, device="cpu", threads=1, eval_every=4, eval_episodes=2, normalize_reward=True,
)  # fmt: skip


class Solo:
    leads = True


def config(folder: Path, **settings: Any) -> hf.TrainConfig:
    return hf.TrainConfig(**{**SMALL, "run_dir": str(folder), **settings})


def milliseconds(report: str) -> dict[str, float]:
    """Of each row of the table, by its name with the indentation."""
    lines = report.split("\n\n")[1].splitlines()[1:]
    return {line[2:60].rstrip(): float(line[60:76].replace(",", "")) for line in lines}


# --- a loop of our own ----------------------------------------------------------------------------------------------


class Loop:
    """The least of a trainer that `Profile` needs: it opens spans and calls the hooks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir()
        self.config = config(folder, **settings)
        self.device = torch.device("cpu")
        self.ranks = Solo()
        self.update = self.steps = 0
        self.said: list[str] = []
        self.notify = self.said.append

    def run(self, watch: hf.Profile) -> None:
        watch.on_run_start(self)  # type: ignore[arg-type]
        while self.update < self.config.num_updates:
            with span("rollout"):
                for _ in range(3):
                    with span("policy"):
                        torch.ones(4).add(1)
            with span("update"), span("minibatch"):
                torch.ones(4).mul(2)
            self.update += 1
            self.steps += 32
            watch.on_update_end(self, {})  # type: ignore[arg-type]
            with span("log"):
                pass
        watch.on_run_end(self)  # type: ignore[arg-type]


def test_spans_of_any_loop_become_a_table_and_a_trace(tmp_path: Path):
    loop, watch = Loop(tmp_path / "run"), hf.Profile()
    loop.run(watch)
    found = [line[2:62].rstrip() for line in watch.report.split("\n\n")[1].splitlines()]
    rows = ["rollout", "  policy", "update", "  minibatch", "log"]
    assert [name for name in found if name in rows] == rows
    policy = next(line for line in watch.report.splitlines() if line.startswith("    policy"))
    assert policy.split()[-1] == "3", "calls per update"
    assert loop.said == [watch.report] and watch.trace is not None
    assert "not in these updates: checkpoint (every 3 updates), replay check (every 50 updates)" in watch.report
    assert span("a") is span("b")


def test_only_the_first_rank_is_observed(tmp_path: Path):
    loop, watch = Loop(tmp_path / "run"), hf.Profile()
    loop.ranks.leads = False
    loop.run(watch)
    assert watch.report == "" and loop.said == [] and not list((tmp_path / "run").iterdir())


# --- the run -------------------------------------------------------------------------------------------------------


def test_the_table_has_every_span_of_an_update_and_they_add_up(tmp_path: Path):
    watch = hf.Profile()
    hf.Trainer(config(tmp_path / "run"), callbacks=[watch]).run()
    found = milliseconds(watch.report)
    for name in (
        "rollout", "  policy", "  environment", "  values for bootstrapping", "  advantages (GAE)", "update",
        "  minibatch", "    clipping and optimizer step", "telemetry of memory", "reward statistics", "log",
        "display", "checkpoint", "evaluation",
    ):  # fmt: skip
        assert name in found, name
    each = float(watch.report.split(" ms each")[0].split()[-1])
    top = sum(value for name, value in found.items() if not name.startswith(" "))
    assert top == pytest.approx(each, rel=0.05)
    inside = sum(value for name, value in found.items() if len(name) - len(name.lstrip()) == 4)
    # Between the parts of a minibatch Python takes some microseconds of about one millisecond, more on a busy machine.
    assert 0.9 * found["  minibatch"] <= inside <= 1.02 * found["  minibatch"]
    assert watch.table is not None and watch.table.read_text() == watch.report + "\n"


def test_forward_and_backward_are_told_apart_where_autograd_runs_them(tmp_path: Path):
    native_gradient, by_autograd = hf.Profile(), hf.Profile()
    hf.Trainer(config(tmp_path / "native_gradient"), callbacks=[native_gradient]).run()
    hf.Trainer(config(tmp_path / "by_autograd", precision="bf16"), callbacks=[by_autograd]).run()
    whole = "    forward and backward"
    if native.status()["kernel"] == "native":
        assert f"{whole} (without autograd)" in milliseconds(native_gradient.report)
    found = milliseconds(by_autograd.report)
    assert found["      forward and loss"] + found["      backward"] == pytest.approx(found[whole], rel=0.05)


ENGINES: dict[str, dict[str, Any]] = {
    "C": {},
    "autograd": dict(precision="bf16"),
    "gymnasium": dict(env="CartPole-v1", env_kwargs={}, mask_velocity=True, normalize_obs=True),
    "workers": dict(env="CartPole-v1", env_kwargs={}, vectorization="workers"),
}


def with_work(folder: Path, **settings: Any) -> hf.TrainConfig:
    """Updates of some 20 ms, as most runs have them; an empty one is mostly calls of functions."""
    work = dict(hidden_size=32, num_envs=16, num_steps=32, total_steps=16 * 32 * 8, eval_every=0)
    return config(folder, **{**work, **settings})


def share_accounted_for(report: str) -> float:
    line = next(line for line in report.splitlines() if line.endswith("of the time is accounted for"))
    return float(line.split("%")[0]) / 100


@pytest.mark.parametrize("engine", ENGINES)
def test_a_profile_accounts_for_95_percent_of_the_time(tmp_path: Path, engine: str):
    watch = hf.Profile()
    trainer = hf.Trainer(with_work(tmp_path / "run", **ENGINES[engine]), callbacks=[watch])
    trainer.run()
    assert trainer.engines["update"].startswith("autograd") == (engine == "autograd" or not native.in_use())
    assert share_accounted_for(watch.report) >= 0.95, watch.report


def test_a_profile_of_ranks_accounts_for_95_percent_of_the_time_and_names_the_exchange(tmp_path: Path):
    first, second = run_ranks(2, rank_jobs.profile, with_work(tmp_path / "run"))
    assert share_accounted_for(first) >= 0.95, first
    assert milliseconds(first)["    averaging gradients over ranks"] > 0
    assert "exchange with other ranks" in first and second == ""


def test_a_profiled_run_writes_the_numbers_of_one_that_is_not(tmp_path: Path):
    hf.Trainer(config(tmp_path / "plain")).run()
    hf.Trainer(config(tmp_path / "watched"), callbacks=[hf.Profile()]).run()
    rows = []
    for name in ("plain", "watched"):
        header, *lines = (tmp_path / name / "progress.csv").read_text().splitlines()
        kept = [i for i, column in enumerate(header.split(",")) if not column.startswith("time/")]
        rows.append([[line.split(",")[i] for i in kept] for line in lines])
    assert rows[0] == rows[1] and len(rows[0]) == 12


def test_nothing_listens_any_more_when_the_window_is_over(tmp_path: Path):
    class Listen(hf.Callback):
        heard = False

        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
            self.heard = span("a") is not span("b")

    listen = Listen()
    hf.Trainer(config(tmp_path / "run", total_steps=4 * 8 * 32), callbacks=[hf.Profile(), listen]).run()
    assert not listen.heard


@pytest.mark.parametrize("at", [4, 11])
def test_a_run_that_fails_in_the_window_leaves_nothing_listening(tmp_path: Path, at: int, monkeypatch: Any):
    monkeypatch.setattr(profile, "TIMED", 6)

    class Fail(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            if trainer.update == at:
                assert span("a") is not span("b"), "this update is observed"
                raise RuntimeError("in the middle")

    trainer = hf.Trainer(config(tmp_path / "run"), callbacks=[hf.Profile(), Fail()])
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.run()
    assert span("a") is span("b")
    hf.Trainer(config(tmp_path / "again", total_steps=64), callbacks=[hf.Profile()]).run()  # the tracer is free again


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_a_short_run_is_profiled_as_far_as_it_goes(tmp_path: Path, updates: int):
    watch = hf.Profile()
    hf.Trainer(config(tmp_path / "run", total_steps=updates * 32), callbacks=[watch]).run()
    assert "where the time goes: update" in watch.report
    assert (watch.trace is not None) == (updates > 1) == ("perfetto" in watch.report)


def test_the_trace_has_the_spans_by_name_and_is_bounded_for_long_updates(tmp_path: Path, monkeypatch: Any):
    sizes = []
    for seconds in (1.0, 0.0):
        monkeypatch.setattr(recording, "LIMIT_SECONDS", seconds)
        watch = hf.Profile()
        hf.Trainer(config(tmp_path / f"run{seconds}", num_steps=64, total_steps=64 * 4 * 4), callbacks=[watch]).run()
        assert watch.trace is not None
        events = json.loads(gzip.decompress(watch.trace.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert {"rollout", "update"} <= names
        sizes.append(len(events))
    assert sizes[1] < 0.2 * sizes[0], "only the beginning of each rollout and update"


def test_a_folder_that_cannot_be_written_costs_the_profile_and_not_the_run(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(profile, "TRACE_NAME", "missing/trace.json.gz")
    monkeypatch.setattr(profile, "TABLE_NAME", "missing/profile.txt")
    watch = hf.Profile()
    result = hf.Trainer(config(tmp_path / "run"), callbacks=[watch]).run()
    assert result.updates == 12 and watch.table is None and watch.trace is None
    assert "could not be written" in watch.report


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_flag_prints_the_table_and_says_how_to_open_the_trace(tmp_path: Path, capsys: Any):
    flags = "train --env holdfast/TMaze-v0 --hidden-size 8 --num-envs 4 --num-steps 8 --minibatches 2 --total-steps 256"
    assert main([*flags.split(), "--no-tensorboard", "--profile", "--run-dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "where the time goes" in said and "open it at https://ui.perfetto.dev" in said
    assert f"profile   {tmp_path}/run/profile.txt" in said
    assert "profile" not in json.loads((tmp_path / "run" / "config.json").read_text())


def test_the_flag_is_for_one_run(capsys: Any):
    assert main(["train", "--profile", "--seeds", "1", "2"]) != 0
    assert "--profile measures one run" in capsys.readouterr().err
