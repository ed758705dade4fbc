"""Losses that a policy adds: in every algorithm, with their weights, under their names, and with messages where they do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.algorithms import algorithm_class
from holdfast.algorithms.auxiliary import AuxiliaryLosses
from holdfast.config import config_class
from holdfast.rollout.vector_env import input_space
from ppo_parts import make_ppo
from reinforce import Reinforce, ReinforceConfig


class Predicting:
    """Adds a head that predicts the reward of a step."""

    def losses(self, features, output, batch):
        T, B = batch.resets.shape
        if not hasattr(self, "head"):
            raise AssertionError("made without its head")
        guess = self.head(features).view(T, B)
        return {"reward_error": (guess - batch.rewards).square()[batch.valid].mean()}


def predicting(policy):
    """This policy, with losses of its own."""
    policy.__class__ = type("Predicting" + type(policy).__name__, (Predicting, type(policy)), {})
    size = policy.features(*first_inputs(policy))[0].shape[1]
    policy.head = nn.Linear(size, 1)
    return policy


def first_inputs(policy):
    space = policy.observation_space
    part = torch.utils._pytree.tree_map(torch.as_tensor, space.sample())
    return torch.utils._pytree.tree_map(lambda x: x[None, None].float(), part), policy.initial_state(1), None


def a_run(name, tmp_path, weight):
    kind = Reinforce if name == "reinforce" else algorithm_class(name)
    make = ReinforceConfig if name == "reinforce" else config_class(name)
    more = {}
    if name in ("sac", "r2d2"):
        more = dict(warmup_steps=0, buffer_size=1000, train_length=8, batch_size=4, burn_in=0, inputs=kind.inputs)
    config = make(
        env="CartPole-v1", core="gru", hidden_size=8, num_envs=4, num_steps=16, total_steps=128, seed=3, quiet=True, tensorboard=False,
        final_eval_episodes=1, checkpoint_every=0, loss_weights={"reward_error": weight}, run_dir=str(tmp_path / "run"), **more,
    )  # fmt: skip
    env = hf.envs.make("CartPole-v1", num_envs=1)
    torch.manual_seed(0)
    spaces = env.single_observation_space, env.single_action_space
    spaces = input_space(*spaces, kind.inputs), spaces[1]
    policy = predicting(kind.make_policy(config, *spaces))
    return hf.Trainer(config, policy=policy, algorithm=kind), policy


@pytest.mark.parametrize("name", ["ppo", "pqn", "reinforce", "sac", "r2d2"])
def test_every_algorithm_trains_and_logs_the_policys_own_losses(name, tmp_path):
    rows = []
    trainer, policy = a_run(name, tmp_path, 1.0)
    trainer.callbacks = [type("Rows", (), {"on_update_end": lambda self, trainer, row: rows.append(row)})()]
    before = policy.head.weight.detach().clone()
    trainer.run()
    assert rows[-1]["train/reward_error"] >= 0 and not torch.equal(policy.head.weight, before)
    assert "train/reward_error" in [metric.key for metric in trainer.algorithm.metrics]
    assert "train/reward_error" in (trainer.folder.path / "progress.csv").read_text().partition("\n")[0]


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_weight_of_zero_measures_and_does_not_train(name, tmp_path):
    trainer, policy = a_run(name, tmp_path, 0.0)
    before = policy.head.weight.detach().clone()
    trainer.run()
    assert torch.equal(policy.head.weight, before)


def a_policy(kind=hf.ActorCritic):
    env = hf.envs.make("CartPole-v1", num_envs=2)
    torch.manual_seed(0)
    return kind(env.single_observation_space, env.single_action_space, "gru", 8), env


def test_the_gradient_is_that_of_the_weighted_sum():
    policy, env = a_policy()
    segment = next(hf.collect(env, predicting(policy), steps=8))
    config = hf.PPOConfig(num_envs=2, num_steps=8, minibatches=1, epochs=1, loss_weights=("reward_error=0.25",))
    ppo, _ = make_ppo(policy, config)
    loss = ppo.make_loss(segment, hf.algorithms.base.Progress(0, 1, 0, 1, 0.0))
    batch = loss.targets(segment)
    engine = ppo.engine_for(batch, loss)
    terms = engine.backward(batch, 1.0)
    found = [p.grad.clone() for p in policy.parameters()]
    features, output = policy.unroll_with_features(batch.obs, batch.start_state, batch.resets)
    own = policy.losses(features, output, batch)["reward_error"]
    total = loss(output, batch)["loss"] + 0.25 * own
    wanted = torch.autograd.grad(total, list(policy.parameters()))
    torch.testing.assert_close(found, list(wanted))
    torch.testing.assert_close(terms["reward_error"], own.detach())


def test_updates_in_c_leave_such_a_policy_to_autograd_and_say_why():
    policy, _ = a_policy()
    _, engines = make_ppo(policy, hf.PPOConfig(num_envs=2, num_steps=8, minibatches=1, epochs=1))
    before = str(engines.update)
    config = hf.PPOConfig(num_envs=2, num_steps=8, minibatches=1, epochs=1, loss_weights={"reward_error": 1})
    _, engines = make_ppo(predicting(policy), config)
    assert "losses" not in before and str(engines.update) == "autograd, because PredictingActorCritic overrides losses"


def test_what_does_not_fit_is_said():
    policy, _ = a_policy()
    with pytest.raises(ValueError, match="names recall, but ActorCritic has no losses of its own; write losses"):
        AuxiliaryLosses.of(policy, hf.PPOConfig(loss_weights={"recall": 1.0}))
    predicting(policy)
    with pytest.raises(ValueError, match="has losses of its own: give each a weight"):
        AuxiliaryLosses.of(policy, hf.PPOConfig())
    for texts in (("recall",), ("recall=much",), ("=1",), ("recall=inf",), ("recall\n=1",), ("recall=1", "recall=2")):
        with pytest.raises(ValueError, match="must be names with numbers, each once, such as"):
            hf.PPOConfig(loss_weights=texts)
    added = AuxiliaryLosses.of(policy, hf.PPOConfig(loss_weights={"recall": 1.0}))
    policy.losses = lambda *_: {"other": torch.zeros(())}
    with pytest.raises(ValueError, match=r"gave other, but .* names recall; make them the same"):
        added.add({}, None, None, None)
    policy.losses = lambda *_: {"recall": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"is of shape \(3,\), expected one number"):
        added.add({}, None, None, None)


def test_weights_are_read_back_from_a_file():
    config = hf.PPOConfig(loss_weights={"recall": 0.5, "next": 2})
    again = hf.PPOConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.weights_of_losses() == {"recall": 0.5, "next": 2.0}
