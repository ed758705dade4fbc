"""The fused minibatch and step of a rollout against the policy and PPO's page in float64, interpreted: no GPU needed."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from gymnasium import spaces

import holdfast as hf
import triton_interpreter
from holdfast.engines.fused_policy import obstacle

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

CASES = (
    "one choice", "one choice, dummy steps", "one choice, normalized values", "several choices", "bits", "numbers",
    "numbers, in units of their bounds", "numbers, no memory",
)  # fmt: skip


@functools.cache
def errors() -> dict[str, dict[str, dict[str, float]]]:
    """By `policy.unroll(...)`, `policy.step(...)` and `ppo_terms(...)` in float64."""
    return triton_interpreter.run(Path(__file__).with_name("interpreted_fused.py"))


@has_triton
@pytest.mark.parametrize("case", CASES)
def test_gradients_metrics_and_the_optimizer_step_are_those_of_the_page(case: str):
    found = errors()[case]["minibatch"]
    assert len(found) >= 7 and max(found.values()) < 3e-6, found


@has_triton
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_a_rollout_is_the_policys(case: str):
    found = errors()[case]["step"]
    assert max(found.values()) < 3e-6, found


@has_triton
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"critic_core": "separate"}, "actor and critic have cores of their own"),
        ({"head_sizes": (8,)}, "there are layers between the core and the outputs"),
        ({"hidden_size": 300}, "the core has more than 256 outputs"),
        ({"hidden_size": 16}, "the policy is not on a GPU"),
        ({"action_space": spaces.Discrete(16)}, "the actor has more than 15 outputs"),
    ],
)
def test_an_obstacle_says_what_keeps_a_policy_from_being_fused(options: dict, reason: str):
    options = {
        "observation_space": spaces.Discrete(3),
        "action_space": spaces.Discrete(2),
        "hidden_size": 16,
        **options,
    }
    policy = hf.ActorCritic(**options)
    assert obstacle(policy, "fp32") == reason
    assert obstacle(policy, "bf16") == "the precision is bf16"
    torch.nn.utils.parametrizations.weight_norm(policy.critic)
    assert obstacle(policy, "fp32") is not None
    policy.actor.weight.register_hook(lambda grad: grad)
    assert obstacle(policy, "fp32") == "actor.weight has a gradient hook"
