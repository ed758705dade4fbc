"""The fused minibatch and step of a rollout against the policy and PPO's page in float64, interpreted: no GPU needed."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces

import holdfast as hf
import triton_interpreter
from holdfast.engines.fused_policy import FusedPolicy, obstacle
from holdfast.runs.log import read_progress

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

CASES = (
    "one choice", "one choice, dummy steps", "one choice, normalized values", "several choices", "bits", "numbers",
    "numbers, in units of their bounds", "numbers, no memory", "27 choices", "two times 12 choices", "16 bits",
    "one choice, after two vectors", "one choice, after three parts",
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
        ({"action_space": spaces.Discrete(128)}, "the actor has more than 127 outputs"),
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


@has_triton
@pytest.mark.parametrize(
    ("space", "fused"),
    [
        (spaces.Discrete(64), True),
        (spaces.Discrete(65), False),
        (spaces.MultiDiscrete([5] * 10), True),
        (spaces.Dict({"obs": spaces.Discrete(6), "prev_action": spaces.MultiDiscrete([13, 13])}), True),
        (spaces.Dict({"obs": spaces.Discrete(7), "prev_action": spaces.MultiDiscrete([13, 13])}), False),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (4,))]), True),
        (spaces.Dict({name: spaces.Discrete(2) for name in "abc"}), False),
    ],
)
def test_the_first_layer_takes_one_or_two_parts_that_fit_next_to_a_tile(space: spaces.Space[Any], fused: bool):
    policy = hf.ActorCritic(space, spaces.Discrete(2), hidden_size=16)
    assert (FusedPolicy(policy)._first is not None) == fused


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("task", "settings", "first_layer"),
    [
        ("CountRecallEasy", {}, True),  # two numbers in an observation
        ("BattleshipEasy", {"core": "gru"}, True),  # two choices of 8; the previous ones are inputs
        ("ConcentrationEasy", {"hidden_size": 256}, False),  # 52 choices, 156 inputs and more
        ("MineSweeperEasy", {"normalize_value": True}, True),
        ("RepeatPreviousEasy", {"inputs": ("obs", "prev_action")}, True),
        ("PositionOnlyCartPoleEasy", {"inputs": ("obs", "prev_action"), "normalize_obs": True}, True),
    ],
)
def test_tasks_with_many_outputs_or_with_their_previous_action_train_fused(
    task: str, settings: dict[str, Any], first_layer: bool, tmp_path: Path
):
    """What is trained is what was played, and a repeated run writes the same rows."""
    rows = []
    for name in ("one", "other"):
        sizes: dict[str, Any] = dict(hidden_size=128, num_envs=256, num_steps=32, minibatches=4, epochs=2)
        config = hf.TrainConfig(
            env=f"holdfast/{task}-v0", **{**sizes, **settings}, total_steps=256 * 32 * 4, device="cuda", quiet=True, seed=7,
            tensorboard=False, checkpoint_every=0, final_eval_episodes=1, replay_check_every=1, run_dir=str(tmp_path / name),
        )  # fmt: skip
        trainer = hf.Trainer(config)
        assert obstacle(trainer.policy, "fp32") is None
        assert (FusedPolicy(trainer.policy)._first is not None) == first_layer
        trainer.run()
        assert trainer.engines["update"] == trainer.engines["rollout"] == "CUDA graph"
        rows.append(read_progress(tmp_path / name))
    kept = [column for column in rows[0][0] if not column.startswith("time/")]
    assert [[row[c] for c in kept] for row in rows[0]] == [[row[c] for c in kept] for row in rows[1]]
    assert max(float(row["memory/replay_gap"]) for row in rows[0]) < 1e-3
    assert all(float(row["train/skipped_steps"]) == 0 for row in rows[0])
