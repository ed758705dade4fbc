"""Several ranks, as `torchrun` starts them for rsl_rl, here with gloo on the CPU: weights, gradients, learning rate."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rsl_rl")

from integrations.rsl_rl.rank_job import update_alone_and_together
from rank_jobs import run_ranks

SETTINGS = {"optimizer": "sgd", "learning_rate": 0.01, "max_grad_norm": 1e9, "desired_kl": 0.01, "entropy_coef": 0.01}


def test_gradients_are_averaged_and_every_rank_takes_the_same_step():
    first, second = run_ranks(2, update_alone_and_together, {**SETTINGS, "schedule": "fixed"})
    for mine, other, a, b in zip(first["together"], second["together"], first["alone"], second["alone"]):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, (a + b) / 2, atol=1e-6, rtol=1e-3)
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(first["alone"], second["alone"]))
    assert torch.equal(first["statistics"], second["statistics"])


def test_the_learning_rate_follows_the_kl_divergence_of_all_ranks():
    first, second = run_ranks(2, update_alone_and_together, {**SETTINGS, "schedule": "adaptive"})
    assert first["together rate"] == second["together rate"]
