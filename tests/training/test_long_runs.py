"""What would spoil a long run: numbers that are not finite, a disk that is full, records that grow without end."""

from __future__ import annotations

import csv
import math
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.algorithms.base import Progress
from holdfast.runs import checkpoint, record
from holdfast.runs.log import RunFolderError, RunLog, read_progress
from holdfast.training.nonfinite import NonFiniteError, NonFiniteGuard, keep_evidence, where_from

SMALL = dict(
    env="failing_env:Failing-v0", hidden_size=8, num_envs=3, num_steps=8, minibatches=2, epochs=2, learning_rate=0.01,
    total_steps=3 * 8 * 8, checkpoint_every=2, final_eval_episodes=2, tensorboard=False, device="cpu", threads=1,
    normalize_obs=True, normalize_reward=True,
)  # fmt: skip


def config(folder: Path, how: str = "raise", times: int = 0, at: int = 3, **settings: Any) -> hf.TrainConfig:
    (folder / "failures").mkdir(exist_ok=True)
    env_kwargs = {"folder": str(folder / "failures"), "how": how, "times": times, "at": at}
    return hf.TrainConfig(**{**SMALL, "run_dir": str(folder / "run"), "env_kwargs": env_kwargs, **settings})


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in read_progress(run)]


def all_finite(trainer: hf.Trainer) -> bool:
    tensors = [t for t in trainer.policy.state_dict().values() if t.is_floating_point()]
    moments = [t for state in trainer.algorithm.optimizer.state.values() for t in state.values()]
    memory = trainer.collector.memory.state_dict()["leaves"]
    numbers = torch.tensor([trainer.algorithm.reward_scale.mean, trainer.algorithm.reward_scale.var])
    return all(bool(t.isfinite().all()) for t in (*tensors, *moments, *memory, numbers))


# --- not finite ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nan obs", "nan reward"])
def test_a_nan_from_the_environment_costs_the_updates_it_spoils_and_nothing_else(tmp_path: Path, capsys: Any, how: str):
    trainer = hf.Trainer(config(tmp_path, how, times=1))
    result = trainer.run()
    skipped = column(tmp_path / "run", "train/skipped_steps")
    assert result.updates == 8 and skipped == [4.0] + [0.0] * 7, "the update that saw it, and no other"
    assert all_finite(trainer) and trainer.nonfinite_guard.total == 1
    losses = column(tmp_path / "run", "train/policy_loss")
    assert math.isnan(losses[0]) and all(map(math.isfinite, losses[1:]))
    assert all(map(math.isfinite, trainer.progress.recent_returns)) and len(trainer.progress.recent_returns) == 3 * (
        8 * 8 // 6
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "not finite, the update was skipped" in line]
    source = "observations" if how == "nan obs" else "rewards"
    assert len(said) == 1 and f"{source} of environment 0 were NaN or infinite in step " in said[0]
    (evidence,) = (tmp_path / "run" / "nonfinite").iterdir()
    kept = checkpoint.load(evidence)
    spoiled = kept["segment"]["obs" if how == "nan obs" else "rewards"]
    assert spoiled.isnan().sum() == 1 and str(evidence) in said[0]
    assert math.isnan(column(tmp_path / "run", "memory/replay_gap")[0]), "there was nothing sound to replay"


def test_what_was_not_finite_is_named(tmp_path: Path):
    segment = hf.Trainer(config(tmp_path)).collector.rollout()
    assert "the network, the loss or another rank" in where_from(segment)
    segment.rewards[5, 1] = math.inf
    assert where_from(segment) == "rewards of environment 1 were NaN or infinite in step 5 of the rollout"
    segment.obs[6, 2, 0] = segment.obs[4, 0, 0] = math.nan
    assert where_from(segment).startswith("observations of environment 0 were NaN or infinite in step 4")
    assert where_from(segment).endswith("step 4 of the rollout, 2 environments in total")


def test_a_nan_now_and_then_is_told_ever_more_rarely(tmp_path: Path):
    told: list[str] = []
    trainer = hf.Trainer(config(tmp_path))
    watch = NonFiniteGuard(trainer.config, 0, told.append)
    segment = trainer.collector.rollout()
    for update in range(1, 34):
        row = {"update": update, "train/skipped_steps": 1.0, "train/epochs": 2.0}
        watch.after_update(row, segment, trainer.policy, trainer.collector.memory)
    assert watch.total == 33 and len(told) == 6
    assert "1 of its steps were skipped (update number 32 of this kind)" in told[-1]


def test_of_the_evidence_the_first_and_the_latest_are_kept(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path))
    segment, weights = trainer.collector.rollout(), trainer.policy.state_dict()
    for update in (3, 5, 8):
        keep_evidence(tmp_path, 1, {"update": update}, segment, weights)
    names = sorted(path.name for path in (tmp_path / "nonfinite").iterdir())
    assert names == ["update_00000003-rank1.pt", "update_00000008-rank1.pt"]


def test_a_gradient_that_is_not_finite_is_skipped_where_it_happens(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path))
    calls, spoiled_weights = [], []

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        calls.append(1)
        if len(calls) == 6:  # the second step of the second update
            spoiled_weights.append(trainer.policy.actor.weight.detach().clone())
            return gradient * math.inf
        if len(calls) == 7:
            assert torch.equal(trainer.policy.actor.weight, spoiled_weights[0]), "the step was not taken"
        return None

    trainer.policy.actor.weight.register_hook(spoil)
    trainer.run()
    assert column(tmp_path / "run", "train/skipped_steps") == [0, 1, 0, 0, 0, 0, 0, 0]
    assert all(map(math.isfinite, column(tmp_path / "run", "train/grad_norm"))), "means are over the steps taken"
    assert all_finite(trainer) and trainer.nonfinite_guard.in_a_row == 0


def test_a_loss_that_overflows_is_skipped_though_its_gradient_is_finite(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path, normalize_value=False))
    segment = trainer.collector.rollout()
    trainer.algorithm.prepare(segment)
    segment.returns = torch.full_like(segment.returns, 1e30)  # its square is beyond float32
    before = [p.clone() for p in trainer.policy.parameters()]
    metrics = trainer.algorithm.start_update(segment, Progress(0, 1, 0, 1, 0.0))()
    assert metrics["train/skipped_steps"] == 4
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters()))


def test_a_run_that_learns_nothing_any_more_stops_at_its_last_good_checkpoint(tmp_path: Path):
    settings = config(tmp_path, "nan reward", times=10**6, at=6, max_bad_updates=2, checkpoint_every=1, quiet=True)
    settings.num_steps = 4  # the first update ends before the first NaN
    with pytest.raises(
        NonFiniteError,
        match=r"in 2 updates in a row.*: rewards of environment 0 .*checkpoint is \S*update_00000001\.pt",
    ):
        hf.Trainer(settings).run()
    assert [p.name for p in checkpoint.rolling(tmp_path / "run")] == ["update_00000001.pt"]
    assert column(tmp_path / "run", "train/skipped_steps") == [0, 4, 4]
    names = sorted(p.name for p in (tmp_path / "run" / "nonfinite").iterdir())
    assert names == ["update_00000002-rank0.pt", "update_00000003-rank0.pt"]
    assert hf.load(tmp_path / "run") is not None


# --- a full disk -----------------------------------------------------------------------------------------------------


@contextmanager
def files_no_larger_than(size: int) -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FullDisk(hf.Callback):
    """No file may grow beyond 300 bytes from one update's rollout to another's."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.limit = first, last, files_no_larger_than(300)

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        if trainer.update == self.first:
            self.limit.__enter__()
        if trainer.update == self.last:
            self.limit.__exit__(None, None, None)


def test_training_goes_on_while_the_disk_is_full_and_nothing_is_lost(tmp_path: Path, capsys: Any):
    steps = 3 * 8 * 12
    hf.Trainer(config(tmp_path, run_dir=str(tmp_path / "whole"), total_steps=steps, quiet=True)).run()
    settings = config(tmp_path, tensorboard=True, total_steps=steps, keep_checkpoints=20)
    assert hf.Trainer(settings, callbacks=[FullDisk(first=2, last=6)]).run().updates == 12
    for name in ("update", "steps", "train/policy_loss", "rollout/ep_rew_mean"):
        assert column(tmp_path / "run", name) == column(tmp_path / "whole", name), name
    said, complaints = capsys.readouterr()
    assert not complaints, "no traceback of anybody's"
    assert said.count("cannot save (") == 1 and said.count("everything that failed before is now written") == 1
    assert said.count("rows of the log are kept in memory") == 1 and "File too large" in said
    saved = [int(p.stem.removeprefix("update_")) for p in checkpoint.rolling(tmp_path / "run")]
    assert saved == [2, 8, 10, 12], "4's and 6's failed, as did the attempt at 5"
    assert not list((tmp_path / "run").rglob("*.tmp")) and not list((tmp_path / "run").glob("*.new"))
    hf.load(tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = [event.step // 24 for event in EventAccumulator(str(tmp_path / "run")).Reload().Scalars("steps")]
    assert shown == [1, 2, 10, 11, 12], "updates 3 to 6 met the full disk, in 3, 4 and 6 it was tried; the next is 10"
    assert len(list((tmp_path / "run").glob("events.*"))) == 2, "one before, one after, none of the attempts"


def test_a_disk_that_stays_full_costs_neither_the_last_checkpoint_nor_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    save, write = checkpoint.save, record.Record.append

    def full_for_checkpoints(path: Path, payload: dict[str, Any]) -> None:
        if tmp_path / "run" in Path(path).parents:
            raise OSError(28, "No space left on device")
        save(path, payload)

    def full_for_rows(progress: record.Record, row: Any) -> None:
        if row["update"] > 2:
            raise OSError(28, "No space left on device")
        write(progress, row)

    monkeypatch.setattr(checkpoint, "save", full_for_checkpoints)
    monkeypatch.setattr(record.Record, "append", full_for_rows)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer = hf.Trainer(config(tmp_path))
    assert trainer.run().stopped_by == "finished"
    said = capsys.readouterr().out
    (elsewhere,) = tmp_path.glob("holdfast-run-*/update_*.pt")
    assert f"the last checkpoint is {elsewhere}" in said and trainer.saved_elsewhere == elsewhere
    assert torch.equal(hf.load(elsewhere).actor.weight, trainer.policy.actor.weight)
    (rows,) = tmp_path.glob("holdfast-run-*/progress.csv")
    assert f"rows of the log that the run's folder could not take are in {rows}" in said
    with open(rows, newline="") as file:
        rest = list(csv.DictReader(file))
    there = read_progress(tmp_path / "run")
    assert [int(row["update"]) for row in [*there, *rest]] == list(range(1, 9)) and there[0].keys() == rest[0].keys()


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunFolderError, match=r"file/run cannot be written .*; choose another folder"):
        hf.Trainer(config(tmp_path, run_dir=str(tmp_path / "file" / "run"))).run()


# --- records ---------------------------------------------------------------------------------------------------------


def test_the_record_of_a_long_run_is_thinned_out_and_stays_so_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(record, "MAX_ROWS", 10)

    def write(folder: Path, cuts: tuple[int, ...]) -> list[int]:
        log, update = RunLog(folder, tensorboard=False, wandb=False, config={}), 0
        while update < 48:
            update += 1
            log.write({"update": update, "steps": update * 8, "train/loss": 1 / update}, update * 8)
            assert len(read_progress(folder)) <= 10
            if update in cuts:
                log.close()
                log = RunLog(folder, tensorboard=False, wandb=False, config={})
                update -= 3
                log.rewind(update)
                cuts = tuple(cut for cut in cuts if cut != update + 3)
        log.close()
        return [int(row["update"]) for row in read_progress(folder)]

    assert write(tmp_path / "whole", ()) == [8, 16, 24, 32, 40, 48]
    assert write(tmp_path / "cut", (9, 11, 22, 40)) == [8, 16, 24, 32, 40, 48]
