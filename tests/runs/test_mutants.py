"""Checkpoints with a right digest and wrong contents: refused in one line, before anything is replaced."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_mutants
import holdfast as hf
from holdfast.runs import checkpoint
from holdfast.runs.checkpoint import CheckpointError


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return checkpoint_mutants.original(0)


def write(path: Path, payload: dict[str, Any]) -> Path:
    checkpoint.save(path, payload)
    return path


def test_mutants_are_refused_in_one_line_or_train_on():
    outcomes, failures = checkpoint_mutants.hunt(80, seed=random.randrange(10**6))
    assert not failures, "\n".join(failures)
    assert sum(outcomes.values()) == 160 and outcomes["resume: refused"] > 20 and outcomes["resume: accepted"] > 3


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("size", [0, 1, 10**4])
def test_moments_of_another_size_never_reach_c(saved: dict[str, Any], tmp_path: Path, moment: str, size: int):
    optimizer = saved["ppo"]["optimizer"]
    states = {index: {**state, moment: torch.zeros(size)} for index, state in optimizer["state"].items()}
    mutant = {**saved, "ppo": {**saved["ppo"], "optimizer": {**optimizer, "state": states}}}
    with pytest.raises(CheckpointError, match=rf"optimizer state 0 {moment} is torch.float32 \[{size}\], expected"):
        hf.Trainer.resume(write(tmp_path / "mutant.pt", mutant))


@pytest.mark.parametrize("setting", [dict(hidden_size=30_000), dict(num_layers=2**40), dict(num_envs=10**9)])
def test_settings_that_ask_for_more_memory_than_the_file_has_weights_are_refused_at_once(
    saved: dict[str, Any], tmp_path: Path, setting: dict[str, int]
):
    path = write(tmp_path / "mutant.pt", {**saved, "config": {**saved["config"], **setting}})
    with pytest.raises(CheckpointError, match=r"policy|num_layers|environments"):
        hf.Trainer.resume(path)
    if "num_envs" not in setting:
        with pytest.raises(CheckpointError, match=r"policy|num_layers"):
            hf.load(path)


def test_a_huge_tensor_made_of_a_few_bytes_is_refused(saved: dict[str, Any], tmp_path: Path):
    huge = torch.zeros(1).expand(10**6, 10**6)
    path = write(tmp_path / "mutant.pt", {**saved, "policy": {**saved["policy"], "actor.weight": huge}})
    assert path.stat().st_size < 10**6
    with pytest.raises(CheckpointError, match="holds more than plain data and was not loaded"):
        checkpoint.load(path)


def test_an_archive_that_is_larger_inside_is_refused(saved: dict[str, Any], tmp_path: Path):
    import hashlib
    import io
    import zipfile

    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"zeros": torch.zeros(10**6)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    body = packed.getvalue()
    digest = hashlib.sha256(body).hexdigest().encode()
    (tmp_path / "bomb.pt").write_bytes(b"holdfast checkpoint 1\n" + digest + b"\n" + body)
    with pytest.raises(CheckpointError, match="was not loaded"):
        checkpoint.load(tmp_path / "bomb.pt")


@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_a_position_beyond_numpys_generator_is_refused(saved: dict[str, Any], tmp_path: Path, position: int):
    numpy = saved["rng"]["numpy"]
    wrong = {**numpy, "state": {**numpy["state"], "pos": position}}
    path = write(tmp_path / "mutant.pt", {**saved, "rng": {**saved["rng"], "numpy": wrong}})
    with pytest.raises(CheckpointError, match=f"numpy's position is {position}, expected an integer from 0 to 624"):
        hf.Trainer.resume(path)


def test_nothing_is_replaced_when_a_late_part_does_not_fit(saved: dict[str, Any], tmp_path: Path):
    trainer = hf.Trainer(hf.TrainConfig(**{**checkpoint_mutants.TINY, **checkpoint_mutants.KINDS[0]}))
    before = [parameter.clone() for parameter in trainer.policy.parameters()]
    from holdfast.training import run_state

    with pytest.raises(ValueError, match="recent_lengths"):
        run_state.restore(trainer, {**saved, "recent_lengths": "x"}, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters())) and not trainer.collector.started


@pytest.mark.parametrize("deck", [[-1, -1, -1, -1], [0, 0, 0, 0], [5, 4, 6, 7], [13, 26, 39, 60]])
def test_a_state_of_the_environment_that_no_episode_reaches_is_refused(
    saved: dict[str, Any], tmp_path: Path, deck: list[int]
):
    collector = saved["collector"]
    env = collector["feed"]["env"]
    wrong = {**env, "state": {**env["state"], "deck": torch.tensor([deck, deck])}}
    mutant = {**saved, "collector": {**collector, "feed": {**collector["feed"], "env": wrong}}}
    with pytest.raises(CheckpointError, match="saved 'deck' is not a valid deck of cards"):
        hf.Trainer.resume(write(tmp_path / "mutant.pt", mutant))
