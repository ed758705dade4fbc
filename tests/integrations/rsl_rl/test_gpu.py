"""rsl_rl's integration on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rsl_rl")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from integrations.rsl_rl import gpu_checks


@pytest.mark.parametrize("rnn_type", gpu_checks.CORES)
def test_training_replays_captured_rollouts(rnn_type):
    gpu_checks.training_replays_captured_rollouts(rnn_type)


def test_a_captured_update_moves_weights_as_an_eager_one():
    gpu_checks.a_captured_update_moves_weights_as_an_eager_one()


def test_no_step_and_no_minibatch_waits_for_the_device():
    gpu_checks.no_step_and_no_minibatch_waits_for_the_device()


def test_a_loaded_checkpoint_is_what_the_next_rollout_and_update_use(tmp_path):
    gpu_checks.a_loaded_checkpoint_is_what_the_next_rollout_and_update_use(tmp_path)
