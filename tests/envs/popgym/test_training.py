"""Policies roll out and train on every family, with and without autograd, whatever its spaces are."""

from __future__ import annotations

import copy

import pytest
import torch

import holdfast as hf
import holdfast.envs
from holdfast.config import TrainConfig
from holdfast.engines import choose
from holdfast.engines import native as native_engine
from holdfast.kernels.cpu import recurrence as native
from holdfast.rollout.vector_env import input_space
from ppo_parts import make_ppo, update

FAMILIES = [
    "NoisyPositionOnlyCartPoleEasy",
    "VelocityOnlyCartPoleEasy",
    "PositionOnlyPendulumHard",
    "NoisyPositionOnlyPendulumEasy",
    "MultiarmedBanditEasy",
    "HigherLowerEasy",
    "AutoencodeEasy",
    "CountRecallHard",
    "ConcentrationHard",
    "BattleshipEasy",
    "MineSweeperEasy",
    "LabyrinthExploreEasy",
]


@pytest.mark.parametrize("inputs", [("obs",), ("obs", "prev_action")], ids=["obs", "obs and action"])
@pytest.mark.parametrize("name", FAMILIES)
def test_both_engines_train_and_agree(name, inputs, monkeypatch):
    torch.manual_seed(FAMILIES.index(name))
    env = holdfast.envs.make(f"holdfast/{name}-v0", 8, seed=FAMILIES.index(name))
    space = input_space(env.single_observation_space, env.single_action_space, inputs)
    policy = hf.ActorCritic(space, env.single_action_space, core="gru", hidden_size=16)
    config = TrainConfig(minibatches=2, epochs=2, num_envs=8, num_steps=24)
    collector = hf.Collector(env, policy, 24, inputs=inputs, seed=1)
    collector.rollout()
    segment = collector.rollout()  # starts in the middle of episodes

    again = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
    torch.testing.assert_close(again.log_prob.detach(), segment.log_prob, rtol=0, atol=1e-5)

    other = copy.deepcopy(policy)
    ppo, engines = make_ppo(policy, config)
    metrics = update(ppo, segment)
    if native.in_use():
        assert engines.update.engine == choose.NATIVE
    monkeypatch.setattr(native_engine, "native_obstacle", lambda policy: "a test says so")
    eager, engines = make_ppo(other, config)
    expected = update(eager, segment)
    assert engines.update.engine == choose.AUTOGRAD
    assert metrics["train/skipped_steps"] == expected["train/skipped_steps"] == 0
    for (label, p), q in zip(policy.named_parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda text, label=label: f"{label}: {text}")


@pytest.mark.parametrize("name", ["AutoencodeEasy", "NoisyPositionOnlyPendulumEasy", "BattleshipEasy"])
def test_a_resumed_run_continues_as_if_it_had_not_stopped(name, tmp_path):
    """Tuple observations, Box actions, MultiDiscrete actions."""
    config = TrainConfig(
        env=f"holdfast/{name}-v0", core="gru", hidden_size=8, num_envs=4, num_steps=8, total_steps=4 * 8 * 4, seed=3,
        checkpoint_every=2, final_eval_episodes=1, quiet=True, tensorboard=False, device="cpu",
        run_dir=str(tmp_path / "whole"),
    )  # fmt: skip
    whole = hf.Trainer(config)
    whole.run()
    resumed = hf.Trainer.resume(str(tmp_path / "whole" / "checkpoints" / "update_00000002.pt"))
    resumed.run()
    for p, q in zip(whole.policy.parameters(), resumed.policy.parameters()):
        assert torch.equal(p, q)
