"""Distributions of users' policies that have no entropy(): it is estimated, with right gradients, and everything else works."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, distributions, nn
from torch.nn.functional import softplus

import holdfast as hf
from holdfast.policies import heads
from holdfast.policies.heads import entropy_of


class NoEntropy(distributions.Categorical):
    """Samples that no gradient passes through, and an entropy that is known to the test alone."""

    entropy = distributions.Distribution.entropy


class NoEntropyNormal(distributions.Normal):
    entropy = distributions.Distribution.entropy


@pytest.fixture(autouse=True)
def _say_again() -> None:
    heads._estimated.clear()


@pytest.mark.filterwarnings("ignore:.*has no entropy")
@pytest.mark.parametrize("kind", ["with a path", "without"])
def test_the_estimate_and_its_gradient_are_right_on_average(kind: str) -> None:
    count = 20_000
    parameters = torch.tensor([0.5, -0.3, 1.0], requires_grad=True)
    rows = parameters.expand(count, 3)
    if kind == "with a path":
        dist: Any = distributions.Independent(NoEntropyNormal(torch.zeros(count, 3), rows.exp()), 1)
        exact = (parameters + 0.5 + 0.5 * math.log(2 * math.pi)).sum()
    else:
        dist = NoEntropy(logits=rows)
        exact = distributions.Categorical(logits=parameters).entropy()
    estimate = entropy_of(dist)
    assert estimate.shape == (count,)
    assert float(estimate.mean().detach()) == pytest.approx(float(exact.detach()), abs=0.01)
    wanted, got = (torch.autograd.grad(x, parameters, retain_graph=True)[0] for x in (exact, estimate.mean()))
    assert float(wanted.abs().max()) > 0.1
    torch.testing.assert_close(got, wanted, atol=0.01, rtol=0)


def test_an_entropy_that_is_there_is_used_and_a_missing_one_is_said_once() -> None:
    exact = distributions.Independent(distributions.Normal(torch.zeros(4, 2), torch.ones(4, 2)), 1)
    assert torch.equal(entropy_of(exact), exact.entropy())
    with pytest.warns(UserWarning, match=r"NoEntropy has no entropy\(\); it is estimated from 16 samples"):
        entropy_of(NoEntropy(logits=torch.zeros(4, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entropy_of(NoEntropy(logits=torch.zeros(4, 2)))


class Policy(hf.RecurrentPolicy):
    """Box actions from a distribution without entropy()."""

    def __init__(self, observation_space: Any, action_space: Any, kind: str = "tanh") -> None:
        super().__init__(core=hf.GRU(observation_space.shape[0], 8))
        self.observation_space, self.action_space, self.kind = observation_space, action_space, kind
        self.actor, self.critic = nn.Linear(8, 4 * action_space.shape[0]), nn.Linear(8, 1)

    def encode(self, obs: Tensor) -> Tensor:
        return obs

    def decode(self, features: Tensor) -> Any:
        out = self.actor(features)
        if self.kind == "tanh":
            mean, log_std = out.chunk(4, -1)[:2]
            normal = distributions.Normal(mean, log_std.exp())
            dist: Any = distributions.TransformedDistribution(normal, distributions.TanhTransform(cache_size=1))
            return distributions.Independent(dist, 1), self.critic(features)
        a, b = (1 + softplus(part).view(len(out), 2, -1) for part in out.chunk(2, -1))
        parts = distributions.Independent(distributions.Beta(a, b), 1)
        return distributions.MixtureSameFamily(distributions.Categorical(torch.ones(len(out), 2)), parts), self.critic(
            features
        )


@pytest.mark.filterwarnings("ignore:.*has no entropy")
@pytest.mark.parametrize("kind", ["tanh", "mixture"])
def test_ppo_trains_such_a_policy_the_doctor_examines_it_and_export_says_what_to_change(
    kind: str, tmp_path: Path
) -> None:
    made = []

    def make(observation_space: Any, action_space: Any) -> Policy:
        made.append(Policy(observation_space, action_space, kind))
        return made[-1]

    sizes = dict(num_envs=2, num_steps=16, total_steps=64, epochs=2, minibatches=1, final_eval_episodes=1)
    config = hf.PPOConfig(
        **sizes, run_dir=str(tmp_path), quiet=True, env_kwargs={"max_episode_steps": 20}, env="Pendulum-v1"
    )
    assert hf.Trainer(config, policy=make).run().steps == 64
    report = hf.doctor.examine(made[0])
    assert report.ok, report
    with pytest.raises(
        ValueError, match=r"no most likely action; let decode return a subclass of it with a property `mode`"
    ):
        hf.export_policy(made[0], tmp_path / "policy.onnx")


class BetaPolicy(Policy):
    def decode(self, features: Tensor) -> Any:
        a, b = (1 + softplus(part) for part in self.actor(features).chunk(4, -1)[:2])
        return distributions.Independent(distributions.Beta(a, b), 1), self.critic(features)


def test_a_beta_distribution_is_exported_to_pt2_and_onnx_says_what_to_change(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    policy = BetaPolicy(spaces.Box(-1, 1, (3,)), spaces.Box(0, 1, (2,)))
    with pytest.raises(
        ValueError, match=r"ONNX file of this BetaPolicy does not run; let the `mode`.*Beta.*or export to \.pt2"
    ):
        hf.export_policy(policy, tmp_path / "policy.onnx")
    assert hf.export_policy(policy, tmp_path / "policy.pt2").path.exists()
