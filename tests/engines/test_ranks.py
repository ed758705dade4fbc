"""Ranks train the same weights whether their minibatches run in C or through autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rank_jobs
from holdfast.engines import choose
from holdfast.kernels.cpu import recurrence as native
from rank_jobs import run_ranks

SETTINGS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, dict(env="holdfast/TMaze-v0"), {}),
    (2, dict(env="holdfast/RepeatPreviousEasy-v0", bptt=8, max_grad_norm=0.05), dict(core="gru", reset="learned")),
    (
        3,
        dict(
            env="holdfast/PositionOnlyPendulumEasy-v0",
            clip_schedule="linear",
            optimizer="adamw",
            memory_learning_rate=2e-4,
        ),
        dict(critic_core="separate"),
    ),
    (4, dict(env="holdfast/PositionOnlyCartPoleEasy-v0", minibatches=1), dict(core=None, normalize_value=True)),
]


@pytest.mark.parametrize(("seed", "settings", "policy_options"), SETTINGS)
def test_two_ranks_train_the_same_weights_in_c_and_by_autograd(
    seed: int, settings: dict[str, Any], policy_options: dict[str, Any]
):
    found = {}
    for way in ("in C", "autograd"):
        here, there = run_ranks(2, rank_jobs.update_with, way, seed, settings, policy_options)
        if native.in_use():
            assert here["engine"] == there["engine"] == (choose.NATIVE if way == "in C" else choose.AUTOGRAD)
        assert torch.equal(here["weights"], there["weights"]), "ranks went apart"
        assert here["rows"] == there["rows"], "a metric is that of all ranks"
        found[way] = here
    assert float((found["in C"]["weights"] - found["autograd"]["weights"]).abs().max()) < 2e-6
    for row, expected in zip(found["in C"]["rows"], found["autograd"]["rows"]):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert float(here["weights"].std()) > 0.05
