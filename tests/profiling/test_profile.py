"""`--profile`: the parts of an update and their time, a trace that stays small, and a run that is not changed by it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.cli import main
from holdfast.kernels.cpu import recurrence as native
from holdfast.profiling import profile
from holdfast.profiling.clock import PartClock, Spent, wrapped
from holdfast.profiling.report import Timed, costs_table, parts_table
from holdfast.profiling.trace import Cost, Trace
from holdfast.training import telemetry

SMALL = dict(
    env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=8, num_envs=4, num_steps=8, minibatches=2, epochs=2,
    total_steps=4 * 8 * 12, checkpoint_every=3, final_eval_episodes=2, learning_rate=0.01, tensorboard=False,
    quiet=True, device="cpu", threads=1, eval_every=4, eval_episodes=2, normalize_reward=True,
)  # fmt: skip


def config(folder: Path, **settings: Any) -> hf.TrainConfig:
    return hf.TrainConfig(**{**SMALL, "run_dir": str(folder), **settings})


def milliseconds(report: str) -> dict[str, float]:
    """Of each line of the table of parts, by its name with the indentation."""
    lines = report.split("\n\n")[1].splitlines()[1:]
    return {line[2:60].rstrip(): float(line[60:76].replace(",", "")) for line in lines}


# --- the run -------------------------------------------------------------------------------------------------------


def test_the_table_has_every_part_of_an_update_and_the_parts_add_up(tmp_path: Path):
    watch = hf.Profile()
    hf.Trainer(config(tmp_path / "run"), callbacks=[watch]).run()
    found = milliseconds(watch.report)
    for name in (
        "rollout", "  policy", "  environment", "  values for bootstrapping", "  advantages (GAE)", "update",
        "  minibatch", "    clipping and optimiser step", "telemetry of memory", "reward statistics", "log",
        "display", "checkpoint", "evaluation",
    ):  # fmt: skip
        assert name in found, name
    each = float(watch.report.split(" ms each")[0].split()[-1])
    top = sum(value for name, value in found.items() if not name.startswith(" "))
    assert top == pytest.approx(each, rel=0.05)
    inside = sum(value for name, value in found.items() if len(name) - len(name.lstrip()) == 4)
    assert inside == pytest.approx(found["  minibatch"], rel=0.05)
    assert watch.table is not None and watch.table.read_text() == watch.report + "\n"


def test_forward_and_backward_are_told_apart_where_autograd_runs_them(tmp_path: Path):
    native_gradient, by_autograd = hf.Profile(), hf.Profile()
    hf.Trainer(config(tmp_path / "native_gradient"), callbacks=[native_gradient]).run()
    hf.Trainer(config(tmp_path / "by_autograd", precision="bf16"), callbacks=[by_autograd]).run()
    whole = "    forward and backward"
    if native.status()["kernel"] == "native":
        assert f"{whole} (without autograd)" in milliseconds(native_gradient.report)
    found = milliseconds(by_autograd.report)
    assert found["      forward"] + found["      loss and backward"] == pytest.approx(found[whole], rel=0.05)


def test_a_profiled_run_writes_the_numbers_of_one_that_is_not(tmp_path: Path):
    hf.Trainer(config(tmp_path / "plain")).run()
    hf.Trainer(config(tmp_path / "watched"), callbacks=[hf.Profile()]).run()
    rows = []
    for name in ("plain", "watched"):
        header, *lines = (tmp_path / name / "progress.csv").read_text().splitlines()
        kept = [i for i, column in enumerate(header.split(",")) if not column.startswith("time/")]
        rows.append([[line.split(",")[i] for i in kept] for line in lines])
    assert rows[0] == rows[1] and len(rows[0]) == 12


def test_no_method_stays_wrapped_when_the_window_is_over(tmp_path: Path):
    before = telemetry.memory_metrics
    trainer = hf.Trainer(config(tmp_path / "run"), callbacks=[hf.Profile()])
    trainer.run()
    for owner in (trainer, trainer.policy, trainer.collector, trainer.collector.adapter, trainer.ppo, trainer.log):
        assert not {"act", "rollout", "step", "update", "forward", "write", "_step", "evaluate"} & {
            name for name, value in vars(owner).items() if callable(value)
        }
    assert telemetry.memory_metrics is before


@pytest.mark.parametrize("at", [4, 11])
def test_a_run_that_fails_in_the_window_leaves_nothing_wrapped(tmp_path: Path, at: int, monkeypatch: Any):
    monkeypatch.setattr(profile, "TIMED", 6)

    class Fail(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            if trainer.update == at:
                raise RuntimeError("in the middle")

    trainer = hf.Trainer(config(tmp_path / "run"), callbacks=[hf.Profile(), Fail()])
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.run()
    assert "act" not in vars(trainer.policy) and "rollout" not in vars(trainer.collector)
    hf.Trainer(config(tmp_path / "again", total_steps=64), callbacks=[hf.Profile()]).run()  # the tracer is free again


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_a_short_run_is_profiled_as_far_as_it_goes(tmp_path: Path, updates: int):
    watch = hf.Profile()
    hf.Trainer(config(tmp_path / "run", total_steps=updates * 32), callbacks=[watch]).run()
    assert "where the time goes: update" in watch.report
    assert (watch.trace is not None) == (updates > 1) == ("perfetto" in watch.report)


def test_the_trace_has_the_parts_by_name_and_is_bounded_for_long_updates(tmp_path: Path, monkeypatch: Any):
    sizes = []
    for seconds in (1.0, 0.0):
        monkeypatch.setattr(profile, "PART_SECONDS", seconds)
        watch = hf.Profile()
        hf.Trainer(config(tmp_path / f"run{seconds}", num_steps=64, total_steps=64 * 4 * 4), callbacks=[watch]).run()
        assert watch.trace is not None
        events = json.loads(gzip.decompress(watch.trace.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert {"rollout", "update"} <= names
        sizes.append(len(events))
    assert sizes[1] < 0.2 * sizes[0], "only the beginning of each part"


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
    assert "--profile looks at one run" in capsys.readouterr().err


# --- the parts of it -----------------------------------------------------------------------------------------------


def test_wrapped_methods_are_their_owners_own_again_even_after_an_error():
    class Owner:
        def f(self) -> int:
            return 1

    owner, clock = Owner(), PartClock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), wrapped([(owner, "f", "f")], clock.around):
        assert owner.f() == 1
        raise ZeroDivisionError
    assert vars(owner) == {} and clock.parts[("f",)].calls == 1


def test_a_part_that_raises_is_closed():
    clock = PartClock(torch.device("cpu"))

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        clock.around("outer", clock.around("inner", fail))()
    clock.around("next", lambda: None)()
    assert list(clock.parts) == [("outer",), ("outer", "inner"), ("next",)]


def test_shares_and_rests_of_the_table_by_hand():
    parts = {("rollout",): Spent(2.0, 4), ("rollout", "policy"): Spent(1.5, 256), ("update",): Spent(6.0, 4)}
    lines = parts_table(Timed(first=11, updates=4, steps=40_000, seconds=10.0, parts=parts), unwatched=5000.0)
    assert lines[0] == "where the time goes: updates 11 to 14, 2,500.0 ms each, 4,000 steps/s"
    cells = {line[:60].strip(): line[60:].split() for line in lines[3:8]}
    assert cells["rollout"] == ["500.00", "20.0%", "1"]
    assert cells["policy"] == ["375.00", "15.0%", "64"]
    assert cells["keeping the steps"] == ["125.00", "5.0%"]
    assert cells["update"] == ["1,500.00", "60.0%", "1"]
    assert cells["everything else"] == ["500.00", "20.0%"]
    assert "unwatched, it was 5,000 steps/s" in lines[-1]


def event(cat: str, name: str, begin: float, length: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "tid": tid}


def test_the_gpu_is_busy_while_anything_runs_and_overlaps_count_once():
    trace = Trace(
        [
            event("kernel", "a", 0, 1e6),
            event("kernel", "b", 500_000, 1e6),  # 0.5 s of it beside a
            event("gpu_memcpy", "copy", 2e6, 1e6),
            event("kernel", "a", 2.2e6, 0.1e6),  # inside the copy
            event("gpu_user_annotation", "update", 0, 9e6),
            event("cpu_op", "launch", 0, 9e6),
        ]
    )
    assert trace.busy_seconds() == pytest.approx(2.5)
    assert trace.kernels() == [Cost("a", pytest.approx(1.1), 2), Cost("b", 1.0, 1), Cost("copy", 1.0, 1)]
    lines = costs_table(trace, on_gpu=True, updates=2, seconds=5.0)
    assert lines[0].startswith("the GPU was busy for 50% of 5,000.0 ms (2 traced updates)")


def test_an_operation_is_counted_without_those_it_calls():
    trace = Trace(
        [
            event("cpu_op", "linear", 0, 10),
            event("cpu_op", "mm", 2, 5),
            event("cpu_op", "copy", 3, 1),
            event("cpu_op", "mm", 20, 4),
            event("cpu_op", "linear", 1, 7, tid=2),  # another thread: inside nothing
        ]
    )
    found = {cost.name: (round(1e6 * cost.seconds), cost.calls) for cost in trace.operations()}
    assert found == {"linear": (5 + 7, 2), "mm": (4 + 4, 2), "copy": (1, 1)}
