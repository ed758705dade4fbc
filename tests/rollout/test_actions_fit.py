"""Actions that do not fit the action space are the policy's fault, and the error says so."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

import holdfast as hf
from holdfast import envs
from holdfast.rollout.vector_env import check_actions

LONG = torch.long


class CartPolePolicy(hf.RecurrentPolicy):
    def __init__(self, outputs: int) -> None:
        super().__init__(core=hf.GRU(4, 8))
        self.actor = nn.Linear(8, outputs)

    def encode(self, obs: Any) -> Tensor:
        return obs

    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Any, Tensor]:
        return self.distribution(self.actor(features)), features[:, 0]

    def distribution(self, out: Tensor) -> Any:
        return Categorical(logits=out)


class Continuous(CartPolePolicy):
    def distribution(self, out: Tensor) -> Any:
        return Independent(Normal(out, 1.0), 1)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (CartPolePolicy(5), r"the policy chose the action [234], .* Discrete\(2\) allows 0 to 1; .* with 2 logits"),
        (
            Continuous(2),
            r"the policy's actions have dtype torch\.float32 and shape \(8, 2\), .* integers of shape \(8,\)",
        ),
    ],
)
def test_a_rollout_blames_the_policy_for_actions_that_are_not_in_the_space(policy: Any, words: str):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=words):
        next(hf.collect(envs.make("CartPole-v1", 8), policy, steps=16))


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(3), torch.tensor([0, 2])),
        (spaces.Discrete(3, start=5), torch.tensor([5, 7], dtype=torch.int32)),
        (spaces.MultiDiscrete([2, 3]), torch.tensor([[1, 2], [0, 0]])),
        (spaces.MultiBinary(2), torch.tensor([[1.0, 0.0]])),
        (spaces.Box(-1, 1, (2,)), torch.tensor([[3.0, -3.0]])),
        (spaces.Box(-1, 1, ()), torch.tensor([0.5])),
        (spaces.Text(3), torch.zeros(2)),
    ],
)
def test_actions_of_a_space_pass(space: gym.Space[Any], action: Tensor):
    check_actions(action, space)


@pytest.mark.parametrize(
    ("space", "action", "words"),
    [
        (spaces.Discrete(3, start=5), torch.tensor([0, 2]), "action 0, .* allows 5 to 7; .* moved by 5"),
        (spaces.Discrete(3), torch.zeros(2), r"dtype torch\.float32"),
        (spaces.Discrete(3), torch.zeros(2, 1, dtype=LONG), r"shape \(2, 1\), .* integers of shape \(2,\)"),
        (spaces.MultiDiscrete([2, 3]), torch.tensor([[2, 2]]), r"action 2, .* allows 0 to \[1, 2\]"),
        (spaces.MultiBinary(2), torch.tensor([[2.0, 0.0]]), r"action 2\.0, .* allows 0 to 1"),
        (spaces.Box(-1, 1, (2,), np.float32), torch.zeros(4, 3), r"shape \(4, 3\), .* numbers of shape \(4, 2\)"),
    ],
)
def test_others_are_refused(space: gym.Space[Any], action: Tensor, words: str):
    with pytest.raises(ValueError, match=words):
        check_actions(action, space)
