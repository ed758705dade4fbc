"""When a run stops before its end."""

from __future__ import annotations

import os
import time
from signal import SIGTERM
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.distributed.processes import Terminated
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


def test_a_rank_whose_torchrun_died_stops_by_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    signal = StopSignal()
    assert not signal.sync(ALONE, CPU)
    monkeypatch.setattr("os.getppid", lambda: 1)  # the process was given to init
    assert signal.sync(ALONE, CPU) and signal.reason == "the end of torchrun" and signal.terminated
    with pytest.raises(Terminated):
        signal.end_at_once()


def test_a_process_whose_shell_ended_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    signal = StopSignal()
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert not signal.sync(ALONE, CPU)


def test_a_process_forked_during_a_run_still_dies_of_sigterm():
    readable, writable = os.pipe()
    with StopSignal().on_sigterm():
        child = os.fork()
        if child == 0:
            os.write(writable, b"!")
            time.sleep(20)
            os._exit(0)
        assert os.read(readable, 1) == b"!", "Python has finished the fork; it discards earlier signals"
        os.kill(child, SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -SIGTERM


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
