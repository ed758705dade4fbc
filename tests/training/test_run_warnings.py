"""Numbers about memory, worked out by hand, and warnings that come once and only when they should."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast.algorithms.base import relative_distance as staleness
from holdfast.algorithms.ppo import PPO
from holdfast.training.iteration import memory_metrics
from holdfast.training.run_warnings import ProgressCheck, Warnings

NO_RESETS = torch.zeros(3, 2, dtype=torch.bool)


def test_memory_numbers_by_hand():
    state = {"actor": {"h": torch.tensor([[1.0, 0.0], [0.5, -0.995]]), "c": torch.tensor([[3.0, 0.0], [0.0, -4.0]])}}
    resets = NO_RESETS.clone()
    resets[0] = True
    row = memory_metrics(state, resets)
    squares = [1.0, 0.0, 0.25, 0.995**2, 9.0, 0.0, 0.0, 16.0]
    assert row["memory/rms"] == pytest.approx(math.sqrt(sum(squares) / 8))
    assert row["memory/max"] == 4.0
    assert row["memory/saturation"] == 0.5, "of h only: c is not bounded"
    assert row["memory/nan"] == 0 and row["memory/resets"] == 2


def test_values_that_are_not_finite_are_counted_and_kept_out_of_the_other_numbers():
    row = memory_metrics({"h": torch.tensor([[math.nan, 0.5, math.inf, 0.5]])}, NO_RESETS)
    assert row["memory/nan"] == 2 and row["memory/max"] == 0.5
    assert math.isfinite(row["memory/rms"]) and row["memory/saturation"] == pytest.approx(0.25)  # Inf is saturated


def test_a_policy_without_memory_has_resets_only():
    assert memory_metrics({}, ~NO_RESETS) == {"memory/resets": 6.0}
    assert staleness({}, {}) == 0.0


def test_staleness_is_the_difference_against_the_size_of_the_state():
    stored = {"h": torch.tensor([[3.0, 0.0]]), "c": torch.tensor([[0.0, 4.0]])}
    moved = {"h": torch.tensor([[3.0, 1.0]]), "c": torch.tensor([[0.0, 4.0]])}
    assert staleness(stored, stored) == 0.0
    assert staleness(stored, moved) == pytest.approx(1 / 5)


def look(row: dict[str, float], times: int = 1, space: Any = None, **settings: Any) -> list[str]:
    config = hf.TrainConfig(**{"num_steps": 8, "total_steps": 1000, **settings})
    warnings = Warnings(
        SimpleNamespace(config=config, advice=PPO.advice), spaces.Discrete(4) if space is None else space, []
    )
    healthy = {
        "update": 1.0,
        "steps": 100.0,
        "memory/saturation": 0.1,
        "memory/nan": 0.0,
        "train/entropy": 1.0,
        "rollout/ep_len_mean": 8.0,
    }
    segment: Any = SimpleNamespace(episode_returns=[])
    return [text for _ in range(times) for text in warnings.after_update({**healthy, **row}, segment)]


def test_a_healthy_run_is_not_warned():
    assert look({}) == []
    assert look({"rollout/ep_len_mean": math.nan, "train/entropy": math.nan}) == []


@pytest.mark.parametrize(
    "row, words",
    [
        ({"memory/saturation": 0.7}, "70% of the memory's units are saturated"),
        ({"memory/nan": 3.0}, "NaN or Inf"),
        ({"train/entropy": 0.001}, "almost stopped exploring"),
        ({"rollout/ep_len_mean": 50.0}, "episodes last 50 steps on average, but gradients reach only 8 steps back"),
    ],
)
def test_each_trouble_is_said_once_with_what_to_do(row: dict[str, float], words: str):
    (said,) = look(row, times=3)
    assert words in said


def test_low_entropy_late_in_a_run_is_as_it_should_be():
    assert look({"train/entropy": 0.001, "steps": 900.0}) == []


def test_continuous_actions_have_no_lowest_entropy():
    assert look({"train/entropy": -5.0}, space=spaces.Box(-1, 1, (2,))) == []


def test_short_sequences_are_named_by_the_setting_that_makes_them_short():
    assert "raise num_steps or bptt" in look({"rollout/ep_len_mean": 50.0}, bptt=4)[0]
    assert look({"rollout/ep_len_mean": 50.0}, core="none") == []


def test_counters_in_a_state_are_kept_out_of_the_numbers():
    state = {"h": torch.tensor([[0.5], [-0.5]]), "age": torch.tensor([1000, 2000], dtype=torch.int32)}
    row = memory_metrics(state, NO_RESETS)
    assert row["memory/rms"] == 0.5 and row["memory/max"] == 0.5 and row["memory/nan"] == 0
    assert staleness(state, {**state, "age": torch.zeros(2, dtype=torch.int32)}) == 0.0
    assert memory_metrics({"age": state["age"]}, NO_RESETS) == {"memory/resets": 0.0}


STUCK = dict(total_steps=900, num_steps=128, num_envs=8, minibatches=8, learning_rate=7e-4)


def progress(settings: dict[str, Any], latest: float, steps: int = 600, update: int = 20) -> str | None:
    """What is said after 50 episodes with returns 9 and 11 and then this mean."""
    check = ProgressCheck(hf.TrainConfig(**{**STUCK, **settings}), PPO.advice, [])
    first = {"update": 1.0, "steps": 100.0, "rollout/ep_rew_mean": 10.0}
    assert check.after_update(first, [9.0, 11.0] * 25) is None
    return check.after_update({"update": update, "steps": float(steps), "rollout/ep_rew_mean": latest}, [])


@pytest.mark.parametrize(
    "settings, remedy",
    [
        (dict(normalize_value=False), "--normalize-obs --normalize-value"),
        (dict(num_steps=64), "--num-steps 128"),
        (dict(learning_rate=1e-3), "a lower --learning-rate, such as 7e-4"),
        (dict(num_envs=64), "--minibatches 32"),
        (dict(num_envs=64, minibatches=32), "--num-envs 32 --epochs 10"),
        ({}, "more steps, or another seed"),
    ],
)
def test_a_run_that_learned_nothing_in_its_first_two_thirds_says_so_with_one_remedy(
    settings: dict[str, Any], remedy: str
):
    text = progress(settings, latest=10.2)
    assert text is not None and remedy in text and "the mean return is 10.2, and it was 10 at the beginning" in text


def test_a_run_that_learns_or_is_still_young_hears_nothing():
    assert progress({}, latest=10.4) is None, "more than a quarter of the deviation, which is 1"
    assert progress({}, latest=10.2, steps=599) is None
    assert progress({}, latest=10.2, update=19) is None


def test_a_run_is_told_once_that_it_learned_nothing():
    check = ProgressCheck(hf.TrainConfig(**STUCK), PPO.advice, [])
    row = {"update": 1.0, "steps": 100.0, "rollout/ep_rew_mean": 1.0}
    assert check.after_update(row, [1.0]) is None
    row |= {"update": 30.0, "steps": 800.0}
    assert check.after_update(row, []) is None, "one episode is not enough to judge by"
    assert check.after_update(row, [2.0]) is not None and check.after_update(row, []) is None


def test_a_run_in_which_no_episode_ends_is_told_once():
    check = ProgressCheck(hf.TrainConfig(**STUCK), PPO.advice, [])
    row = {"update": 30.0, "steps": 800.0, "rollout/ep_rew_mean": math.nan}
    said = check.after_update(row, [])
    assert said is not None and said.startswith("no episode has ended in 800 steps") and "TimeLimit" in said
    assert check.after_update(row, []) is None


def test_a_run_that_was_resumed_from_an_old_checkpoint_is_told_neither():
    check = ProgressCheck(hf.TrainConfig(**STUCK), PPO.advice, None)
    row = {"update": 30.0, "steps": 800.0, "rollout/ep_rew_mean": 475.0}  # of the episodes before
    assert check.after_update(row, []) is None
    assert check.after_update(row, [475.0, 474.0]) is None


def test_a_run_whose_episodes_end_in_other_ranks_is_not_told_that_none_has_ended():
    check = ProgressCheck(hf.TrainConfig(**STUCK), PPO.advice, [])
    for update, steps in (1.0, 100.0), (30.0, 800.0):
        assert check.after_update({"update": update, "steps": steps, "rollout/ep_rew_mean": 475.0}, []) is None
