"""The presets solve their tasks with an LSTM and with a GRU; without memory the same settings do not.

Slow (minutes): `make test-learning`. One seed each, another one with `make test-learning SEED=7`; `benchmarks/learning.py` has ten
of every preset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from learning.base_seed import BASE_SEED

TASKS = ("repeat-previous-easy", "repeat-first-easy", "position-only-cartpole-easy", "t-maze")
SOLVED = 0.95
"""Mean return over 100 fresh episodes; 1 is perfect in all of these tasks."""


def train(folder: Path, task: str, **settings: Any) -> float:
    config = hf.TrainConfig.preset(
        task, seed=BASE_SEED, device="cpu", threads=1, run_dir=str(folder), quiet=True, tensorboard=False, **settings
    )
    return hf.Trainer(config).run().mean_return


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("task", TASKS)
def test_a_preset_solves_its_task(tmp_path: Path, task: str, core: str):
    assert train(tmp_path / "run", task, core=core) >= SOLVED


@pytest.mark.parametrize("task", TASKS)
def test_the_same_settings_without_memory_do_not(tmp_path: Path, task: str):
    assert train(tmp_path / "run", task, core="none") <= SOLVED - 0.3
