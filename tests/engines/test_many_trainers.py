"""Many runs in one process, of different sizes, cores and precisions: none disturbs another. On a GPU, if there is one."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = dict(
    num_steps=32, minibatches=4, epochs=2, final_eval_episodes=2, checkpoint_every=0, tensorboard=False, quiet=True, device=DEVICE,
)  # fmt: skip
RUNS: list[dict[str, Any]] = [
    dict(core="lstm", hidden_size=32, num_envs=32),
    dict(core="lstm", hidden_size=64, num_envs=64),
    dict(core="gru", hidden_size=48, num_envs=16),
    dict(core="lstm", hidden_size=128, num_envs=32, precision="bf16"),
    dict(core="none", hidden_size=32, num_envs=32),
    dict(core="gru", hidden_size=96, num_envs=24, critic_core="separate"),
    dict(core="lstm", hidden_size=40, num_envs=8, num_layers=2),
    dict(core="gru", hidden_size=64, num_envs=64, precision="bf16"),
    dict(core="lstm", hidden_size=16, num_envs=32, reset="learned"),
    dict(core="lstm", hidden_size=72, num_envs=40, normalize_obs=True, env="holdfast/PositionOnlyCartPoleEasy-v0"),
]


def config(folder: Path, number: int, updates: int = 3) -> hf.TrainConfig:
    settings = {"env": "holdfast/RepeatPreviousEasy-v0", **SMALL, **RUNS[number]}
    settings["total_steps"] = updates * settings["num_envs"] * settings["num_steps"]
    return hf.TrainConfig(**settings, seed=number, run_dir=str(folder / str(number)))


@pytest.mark.parametrize("collect", [False, True], ids=["garbage left alone", "garbage collected"])
def test_ten_trainers_one_after_another(tmp_path: Path, collect: bool):
    for number in range(len(RUNS)):
        result = hf.Trainer(config(tmp_path, number)).run()
        assert result.updates == 3 and result.stopped_by == "finished"
        if collect:
            gc.collect()


def test_garbage_that_appears_during_a_capture_waits(tmp_path: Path):
    """Every allocation may run the collector, which frees the graphs of earlier runs: here, at nearly every one."""
    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for number in range(4):
            assert hf.Trainer(config(tmp_path, number)).run().updates == 3
    finally:
        gc.set_threshold(*before)


def test_two_trainers_side_by_side_whose_updates_alternate_both_finish(tmp_path: Path):
    barrier = threading.Barrier(2)

    class Turns(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            barrier.wait(60)

    errors: list[BaseException] = []
    updates: list[int] = []

    def run(number: int) -> None:
        try:
            trainer = hf.Trainer(config(tmp_path, number), callbacks=[Turns()])
            updates.append(trainer.run().updates)
            assert all(p.isfinite().all() for p in trainer.policy.parameters())
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors, errors
    assert updates == [3, 3]
