"""When a run stops before its end."""

from __future__ import annotations

from typing import Any

import torch

import holdfast as hf
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.training.stop_signal import StopSignal

CPU = torch.device("cpu")


def test_a_reason_on_one_rank_reaches_all():
    class Two(Ranks):
        def all_gather(self, numbers: list[float], device: torch.device) -> list[list[float]]:
            return [numbers, [3.0]]  # the other rank had a Ctrl-C

    signal = StopSignal()
    assert signal.sync(Two(0, 2, True), CPU) and signal.reason == "interrupt"
    assert not StopSignal().sync(ALONE, CPU)


def test_a_ctrl_c_during_the_exchange_is_not_lost():
    signal = StopSignal()

    class Meanwhile(Ranks):
        def all_gather(self, numbers: list[float], device: torch.device) -> list[list[float]]:
            signal.reason = "interrupt"
            return [numbers]

    assert not signal.sync(Meanwhile(), CPU) and signal.reason == "interrupt"
    assert signal.sync(ALONE, CPU)


def test_a_hook_at_the_end_changes_nothing_and_hides_nothing(tmp_path: Any):
    class AtTheEnd(hf.Callback):
        def on_run_end(self, trainer: hf.Trainer) -> Any:
            return False

    config = hf.TrainConfig(
        num_envs=4, num_steps=8, hidden_size=8, total_steps=32, final_eval_episodes=1, tensorboard=False, quiet=True,
        run_dir=str(tmp_path / "run"), device="cpu",
    )  # fmt: skip
    assert hf.Trainer(config, callbacks=[AtTheEnd()]).run().stopped_by == "finished"


def test_ctrl_c_stays_the_reason_when_a_callback_stops_too(tmp_path: Any):
    class Both(hf.Callback):
        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
            trainer.stop_signal.reason = "interrupt"
            return False

    config = hf.TrainConfig(
        num_envs=4, num_steps=8, hidden_size=8, total_steps=320, final_eval_episodes=1, tensorboard=False, quiet=True,
        run_dir=str(tmp_path / "run"), device="cpu",
    )  # fmt: skip
    assert hf.Trainer(config, callbacks=[Both()]).run().stopped_by == "interrupt"
