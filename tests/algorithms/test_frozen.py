"""Parameters that need no gradient stay as they are, in every algorithm and over a resume; the rest is trained."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.algorithms import algorithm_class
from holdfast.config import config_class
from holdfast.rollout.vector_env import input_space


def parts(policy):
    return {
        "encoder": [policy.encoder, policy.trunk],
        "core": [policy.core],
        "heads": [m for name, m in policy.named_children() if name not in ("encoder", "trunk", "core", "memory")],
    }


def a_run(name, frozen, folder, **more):
    kind = algorithm_class(name)
    if name in ("sac", "r2d2"):
        more |= dict(warmup_steps=0, buffer_size=1000, train_length=8, batch_size=4, burn_in=0)
    if name == "ppo":
        more["normalize_value"] = False  # its layer is rescaled as statistics move, so that values stay what they are
    config = config_class(name)(
        env="CartPole-v1", core="gru", hidden_size=8, num_envs=4, num_steps=16, seed=3, quiet=True, tensorboard=False,
        final_eval_episodes=1, inputs=kind.inputs, run_dir=str(folder), **{"total_steps": 256, **more},
    )  # fmt: skip
    env = hf.envs.make("CartPole-v1", num_envs=1)
    torch.manual_seed(0)
    seen = input_space(env.single_observation_space, env.single_action_space, kind.inputs)
    policy = kind.make_policy(config, seen, env.single_action_space)
    for module in parts(policy)[frozen]:
        module.requires_grad_(False)
    return hf.Trainer(config, policy=policy), policy


@pytest.mark.parametrize("frozen", ["encoder", "core", "heads"])
@pytest.mark.parametrize("name", ["ppo", "pqn", "sac", "r2d2"])
def test_frozen_parts_keep_their_weights_and_the_others_learn(name, frozen, tmp_path):
    trainer, policy = a_run(name, frozen, tmp_path / "run")
    before = {key: p.detach().clone() for key, p in policy.named_parameters()}
    trainer.run()
    for key, p in policy.named_parameters():
        assert p.requires_grad or torch.equal(p, before[key]), key
    assert any(p.requires_grad and not torch.equal(p, before[key]) for key, p in policy.named_parameters())


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_run_with_frozen_parts_resumes(name, tmp_path):
    trainer, policy = a_run(name, "core", tmp_path / "run", total_steps=128)
    trainer.run()
    _, again = a_run(name, "core", tmp_path / "other")
    resumed = hf.Trainer.resume(tmp_path / "run", policy=again, total_steps=256)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), policy.parameters()))
    resumed.run()
    assert all(torch.equal(a, b) for a, b in zip(again.core.parameters(), policy.core.parameters()))
    assert not torch.equal(again.trunk[0].weight, policy.trunk[0].weight)


def test_a_policy_that_is_all_frozen_is_refused(tmp_path):
    trainer, policy = a_run("ppo", "core", tmp_path)
    policy.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter of ActorCritic is frozen"):
        hf.Trainer(trainer.config, policy=policy)
