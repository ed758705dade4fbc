"""A partially observed robot inside rsl_rl's runner: learned with our classes at least as well as with its own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rsl_rl")

from integrations.rsl_rl.arm import EXAMPLE, Arm, learn, make_runner

SEEDS = range(5)
ITERATIONS = 70


def mean_reward(ours, seed):
    """Per step, after training; 1 is perfect, and 0.33 is what standing still gives."""
    sizes = {"hidden_dims": [32], "rnn_hidden_dim": 32}
    env = Arm(128, seed=seed, final_obs=False)  # both bootstrap timeouts with V(s_t)
    runner = make_runner(
        ours,
        seed=seed,
        env=env,
        num_steps=24,
        actor=sizes,
        critic=sizes,
        num_learning_epochs=4,
        num_mini_batches=4,
    )
    learn(runner, ITERATIONS)
    return EXAMPLE.mean_reward(runner.get_inference_policy(), Arm(200, seed=1000 + seed))


def test_a_robot_that_is_told_once_where_to_go_learns_it_as_well_as_with_rsl_rls_own_classes():
    ours, theirs = (torch.tensor([mean_reward(who, seed) for seed in SEEDS]) for who in (True, False))
    print(f"ours {ours.tolist()}, rsl_rl's {theirs.tolist()}")
    assert ours.min() > 0.8
    error = ((ours.var() + theirs.var()) / len(SEEDS)).sqrt()  # of the difference of the means
    assert ours.mean() - theirs.mean() > -2 * error
