"""Checkpoint files: refused when damaged or foreign, never running code, never half written."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import random
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import holdfast as hf
from holdfast import envs
from holdfast.runs import checkpoint
from holdfast.runs.checkpoint import MAGIC, VERSION, CheckpointError

RNG_128 = 2**127 + 12345  # numpy's generators have states of this size


def small_run(folder: Path, **settings: Any) -> hf.Trainer:
    config = dict(
        env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=8, num_envs=4, num_steps=8, minibatches=2,
        epochs=1, total_steps=4 * 8 * 4, checkpoint_every=1, final_eval_episodes=2, tensorboard=False, quiet=True,
        device="cpu", normalize_obs=True, run_dir=str(folder),
    )  # fmt: skip
    trainer = hf.Trainer(hf.TrainConfig(**{**config, **settings}))
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with three rolling checkpoints; tests copy what they change."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    small_run(folder)
    return folder


def with_header(body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest().encode()
    return MAGIC + str(VERSION).encode() + b"\n" + digest + b"\n" + body


class Harmful:
    """Unpickling it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.mark)!r}, 'w').write('ran')",))


# --- damage ---------------------------------------------------------------------------------------------------------


def test_200_single_bit_flips_over_all_ranges_are_refused(run: Path, tmp_path: Path):
    whole = checkpoint.find(run).read_bytes()
    draw = random.Random(0)
    header = len(MAGIC) + 2 + 65
    # The header holds the version and the digest: every eighth flip goes there, the others are spread over the payload.
    slices = [header + (len(whole) - header) * i // 175 for i in range(176)]
    places = [draw.randrange(header) for _ in range(25)] + [draw.randrange(*span) for span in pairwise(slices)]
    assert len(places) == 200
    damaged = tmp_path / "damaged.pt"
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << draw.randrange(8)
        damaged.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"damaged|first bytes|version"):
            checkpoint.load(damaged)


def test_every_truncation_is_refused(run: Path, tmp_path: Path):
    whole = checkpoint.find(run).read_bytes()
    torn = tmp_path / "torn.pt"
    for size in [0, 1, len(MAGIC), len(MAGIC) + 1, 50, 87, 88, 1000, len(whole) // 2, len(whole) - 1]:
        torn.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"torn\.pt: "):
            checkpoint.load(torn)
    torn.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="SHA-256"):
        checkpoint.load(torn)


def test_another_version_is_refused_and_both_are_named(run: Path, tmp_path: Path):
    other = tmp_path / "other.pt"
    other.write_bytes(checkpoint.find(run).read_bytes().replace(b"checkpoint 1\n", b"checkpoint 2\n", 1))
    with pytest.raises(CheckpointError, match=f"version '2', this Holdfast reads version {VERSION}"):
        checkpoint.load(other)


@pytest.mark.parametrize("make", ["pickle", "torch", "pickle with header", "torch with header"])
def test_code_in_a_file_never_runs(tmp_path: Path, make: str):
    mark, path = tmp_path / "mark", tmp_path / "harm.pt"
    payload = {"config": Harmful(mark)}
    buffer = io.BytesIO()
    if make.startswith("torch"):
        torch.save(payload, buffer)
    else:
        pickle.dump(payload, buffer)
    body = buffer.getvalue()
    path.write_bytes(with_header(body) if make.endswith("header") else body)
    words = "holds more than plain data" if make.endswith("header") else "not a Holdfast checkpoint"
    for load in (checkpoint.load, hf.load, hf.Trainer.resume):
        with pytest.raises(CheckpointError, match=words):
            load(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(payload))  # it is harmful indeed
    assert mark.exists()


def test_a_payload_that_is_no_trainers_is_refused(tmp_path: Path):
    path = tmp_path / "foreign.pt"
    checkpoint.save(path, {"weights": torch.zeros(2)})
    for load in (hf.load, hf.Trainer.resume):
        with pytest.raises(
            CheckpointError, match="this checkpoint was not written by a trainer: it has no collector, config"
        ):
            load(path)
    buffer = io.BytesIO()
    torch.save([1, 2], buffer)
    path.write_bytes(with_header(buffer.getvalue()))
    with pytest.raises(CheckpointError, match="holds a list"):
        checkpoint.load(path)


# --- the previous one -----------------------------------------------------------------------------------------------


def copy_of(run: Path, to: Path) -> Path:
    for file in checkpoint.rolling(run):
        target = checkpoint.folder_of(to) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return to


def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_it_offered(run: Path, tmp_path: Path):
    mine = copy_of(run, tmp_path / "run")
    *_, before, newest = checkpoint.rolling(mine)
    newest.write_bytes(newest.read_bytes()[:-5])
    for load in (hf.load, hf.Trainer.resume):
        with pytest.raises(CheckpointError) as refused:
            load(mine)
        assert "damaged or cut short" in str(refused.value) and f"The previous checkpoint is {before}" in str(
            refused.value
        )
    assert hf.Trainer.resume(before).update == 3
    best = checkpoint.folder_of(mine) / "best.pt"
    best.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=f"The previous checkpoint is {newest}"):
        hf.load(best)


def test_a_lone_damaged_checkpoint_says_that_there_is_no_other(tmp_path: Path):
    path = checkpoint.path_for(tmp_path, 5)
    path.parent.mkdir()
    path.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="This run has no earlier checkpoint"):
        hf.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "policy.onnx", "videos/first.gif"])
def test_another_file_of_a_run_is_no_damaged_checkpoint_and_the_run_is_named(tmp_path: Path, name: str):
    checkpoint.save(checkpoint.path_for(tmp_path, 5), {})
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    said = f"{file}: this is not a Holdfast checkpoint. It lies in a run: name the run's folder, {tmp_path}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(said)}$"):
        hf.load(file)


def test_a_damaged_file_outside_of_a_run_is_said_without_a_word_on_runs(tmp_path: Path):
    (tmp_path / "copied.pt").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"not a Holdfast checkpoint, or its first bytes are damaged$"):
        hf.load(tmp_path / "copied.pt")


def test_what_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such file or run folder"):
        hf.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoints"):
        hf.load(tmp_path)


# --- writing --------------------------------------------------------------------------------------------------------


def test_what_was_saved_comes_back(tmp_path: Path):
    payload = {
        "tensor": torch.arange(3), "nested": [{"a": 1.5, 2: None}, "text", True], "big": RNG_128, "pair": (1, 2.0),
        "nan": float("nan"), "bf16": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip
    checkpoint.save(tmp_path / "deep" / "er" / "file.pt", payload)
    back = checkpoint.load(tmp_path / "deep" / "er" / "file.pt")
    assert torch.equal(back["tensor"], payload["tensor"]) and back["nested"] == payload["nested"]
    assert back["big"] == RNG_128 and back["nan"] != back["nan"] and back["bf16"].dtype == torch.bfloat16


@pytest.mark.parametrize("thing", [np.zeros(2), np.float64(1.0), {1, 2}, object(), torch.float32, Path("x"), b"bytes"])
def test_only_plain_data_is_saved(tmp_path: Path, thing: Any):
    with pytest.raises(TypeError, match=r"payload\['outer'\]\[1\]: a checkpoint holds"):
        checkpoint.save(tmp_path / "file.pt", {"outer": [1, thing]})
    assert list(tmp_path.iterdir()) == []


def test_a_runs_checkpoint_holds_nothing_but_plain_data(run: Path):
    def walk(value: Any) -> None:
        if type(value) is dict:
            assert all(type(key) in (str, int) for key in value)
            for part in value.values():
                walk(part)
        elif type(value) in (list, tuple):
            for part in value:
                walk(part)
        else:
            assert value is None or type(value) in (bool, int, float, str, Tensor), type(value)

    payload = checkpoint.load(checkpoint.find(run))
    walk(payload)
    needed = {"policy", "ppo", "collector", "rng", "threads", "reward_scale", "config", "holdfast", "update", "steps"}
    assert needed <= payload.keys()
    assert {"torch", "numpy", "python"} <= payload["rng"].keys()
    assert payload["collector"]["memory"]["num_rows"] == 4 and payload["collector"]["feed"]["env"] is not None


def test_an_error_while_writing_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file.pt"
    checkpoint.save(path, {"n": 1})

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(path, {"n": 2})
    assert checkpoint.load(path) == {"n": 1} and [p.name for p in tmp_path.iterdir()] == ["file.pt"]


KILLED_WHILE_WRITING = """
import os, signal, sys
from holdfast.runs import checkpoint
checkpoint.save(sys.argv[1], {"n": 1})
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[2], die)
checkpoint.save(sys.argv[1], {"n": 2})
"""


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_process_killed_while_writing_leaves_the_old_one_usable(tmp_path: Path, moment: str):
    path = checkpoint.path_for(tmp_path, 1)
    child = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(path), moment], capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert checkpoint.load(path) == {"n": 1}
    assert len(list(path.parent.iterdir())) == 2, "the torn one is there, under another name"
    assert checkpoint.find(tmp_path) == path
    checkpoint.prune(tmp_path, keep=3)
    assert list(path.parent.iterdir()) == [path]


def test_the_newest_are_kept_and_no_more(run: Path, tmp_path: Path):
    assert [p.name for p in checkpoint.rolling(run)] == [f"update_{n:08d}.pt" for n in (2, 3, 4)]
    small_run(tmp_path / "one", keep_checkpoints=1)
    assert [p.name for p in checkpoint.rolling(tmp_path / "one")] == ["update_00000004.pt"]


# --- using ----------------------------------------------------------------------------------------------------------


def test_a_loaded_policy_acts_as_the_trained_one_did(tmp_path: Path):
    trainer = small_run(tmp_path / "run")
    policy = hf.load(tmp_path / "run")
    env = envs.make("holdfast/TMaze-v0", 3, env_kwargs={"length": 3})
    results = [hf.evaluate(p, env, 6, seed=1).returns for p in (trainer.policy, policy)]
    assert results[0] == results[1]
    mine, theirs = policy.state_dict(), trainer.policy.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert any("mean" in key for key in mine), "the normaliser is part of it"
    assert policy.memory.num_envs == 0, "and has fresh memory"
    assert policy.predict(np.zeros(4, np.float32))[0].shape == ()


def test_weights_load_with_another_number_of_environments(run: Path):
    policy = hf.load(run)
    for num_envs in (1, 9):
        env = envs.make("holdfast/TMaze-v0", num_envs, env_kwargs={"length": 3})
        segment = next(hf.collect(env, policy, 5, memory=hf.Memory(policy.core)))
        assert segment.num_envs == num_envs


def test_a_policy_of_ones_own_is_asked_for(tmp_path: Path):
    class Mine(hf.ActorCritic):
        pass

    def make() -> Mine:
        env = envs.make("holdfast/TMaze-v0", 4, env_kwargs={"length": 3})
        return Mine(env.single_observation_space, env.single_action_space, "gru", 8)

    config = hf.TrainConfig.from_dict({**small_run(tmp_path / "a").config.to_dict(), "run_dir": str(tmp_path / "b")})
    trainer = hf.Trainer(config, policy=make())
    trainer.run()
    with pytest.raises(ValueError, match=r"hf\.load\(path, policy=MyPolicy\(\)\)"):
        hf.load(tmp_path / "b")
    with pytest.raises(ValueError, match=r"Trainer\.resume\(path, policy=\.\.\.\)"):
        hf.Trainer.resume(tmp_path / "b")
    mine = hf.load(tmp_path / "b", policy=make())
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), trainer.policy.parameters()))
