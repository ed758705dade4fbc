"""The replay check stops a run whose training leg differs from its rollout, and says what differs."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import nn

import holdfast as hf
from broken import OF_HOLDFAST, holdfast_loops, holdfast_policies
from broken.holdfast_loops import Loop
from counting_env import MODES, vector_env
from holdfast import envs
from holdfast.algorithms.base import replay_difference
from holdfast.runs.log import read_progress
from holdfast.training import replay_check
from holdfast.training.replay_check import ReplayError

LENGTHS = ({"unit": 0.3, "lengths": (3, 5)}, {"unit": -0.2, "lengths": (4, 7), "ends": ("truncated", "terminated")})


def config(folder: Path, **settings: Any) -> hf.TrainConfig:
    small = dict(
        env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=8, num_envs=4, num_steps=16, minibatches=2,
        epochs=1, total_steps=4 * 16 * 4, replay_check_every=1, final_eval_episodes=1, tensorboard=False, quiet=True,
        device="cpu", run_dir=str(folder / "run"),
    )  # fmt: skip
    return hf.TrainConfig(**{**small, **settings})


class Stores(hf.Callback):
    """Leaves in each segment what a broken loop would store."""

    def __init__(self, loop: type[Loop]) -> None:
        self.loop = loop

    def on_rollout_end(self, trainer: Any, segment: Any) -> None:
        self.loop(trainer.policy).store(segment)


def words_of(folder: Path, loop: type[Loop], **settings: Any) -> str:
    """The error of a run whose segments a broken loop stores."""
    with pytest.raises(ReplayError) as stopped:
        hf.Trainer(config(folder, **settings), callbacks=[Stores(loop)]).run()
    text = str(stopped.value)
    assert text.startswith("training does not replay the rollout") and "environment" in text
    return text


def expected(kind: type) -> str:
    """What the replay check must say about a broken loop or policy."""
    (words,) = [broken.replay_check for broken in OF_HOLDFAST if broken.name.endswith(f"-{kind.__name__}")]
    return words


# --- broken loops and policies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [holdfast_loops.TrainsLateByOne, holdfast_loops.TrainsEarlyByOne])
@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("bptt", [None, 4])
def test_resets_off_by_one_stop_the_run(tmp_path: Path, loop: type[Loop], core: str, bptt: int | None):
    assert expected(loop) in words_of(tmp_path, loop, core=core, bptt=bptt)


def test_an_off_by_one_is_found_in_the_first_update_at_the_size_people_train(tmp_path: Path):
    words_of(tmp_path, holdfast_loops.TrainsLateByOne, hidden_size=128, replay_check_every=1000)
    assert read_progress(tmp_path / "run") == [], "stopped before the first optimizer step"


def test_dropped_resets_stop_the_run(tmp_path: Path):
    loop = holdfast_loops.TrainsWithoutResets
    assert expected(loop) in words_of(tmp_path, loop)


def test_truncations_that_do_not_reset_stop_the_run():
    torch.manual_seed(0)
    env = vector_env(AutoresetMode.SAME_STEP, *LENGTHS)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    segment = next(hf.collect(env, policy, 16))
    loop = holdfast_loops.ForgetsTruncationInTraining
    loop(policy).store(segment)
    with pytest.raises(ReplayError, match=expected(loop)):
        replay_check.check_policy(policy, segment)


def test_training_from_zeros_stops_the_run(tmp_path: Path):
    loop = holdfast_loops.TrainsFromZeros
    assert expected(loop) in words_of(tmp_path, loop)
    assert len(read_progress(tmp_path / "run")) == 1, "the first rollout does begin from zeros"


def test_a_rollout_that_began_from_zeros_though_its_stored_state_did_not_stops_the_run(tmp_path: Path):
    class LosesTheFirstFlag(holdfast_loops.TrainsFromAnotherState):
        """The first flag would clear the wrong start state."""

        def store(self, segment: Any) -> None:
            super().store(segment)
            segment.resets[0] = False

    assert expected(holdfast_loops.TrainsFromAnotherState) in words_of(tmp_path, LosesTheFirstFlag)


@pytest.mark.parametrize(
    "kind",
    [
        holdfast_policies.NeverResets,
        holdfast_policies.MovesStatisticsDuringTheRollout,
        holdfast_policies.HalfPrecisionInOneLeg,
        holdfast_policies.ClampsInOneLeg,
    ],
)
def test_a_policy_whose_legs_differ_stops_the_run(tmp_path: Path, kind: type[hf.ActorCritic]):
    torch.manual_seed(0)
    settings = config(tmp_path)
    env = envs.make(settings.env, 4, env_kwargs=settings.env_kwargs)
    policy = kind(env.single_observation_space, env.single_action_space, "lstm", 8)
    with pytest.raises(ReplayError, match=re.escape(expected(kind))):
        hf.Trainer(settings, env=env, policy=policy).run()


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (holdfast_policies.WithDropout, r"remove them from the policy, or set them to eval\(\)"),
        (holdfast_policies.WithBatchNorm, "batch statistics"),
        (holdfast_policies.WithNoise, "something in encode or decode is random"),
    ],
)
def test_random_and_batch_dependent_layers_in_a_users_encoder_stop_the_run(
    tmp_path: Path, kind: type[holdfast_policies.WithLayer], advice: str
):
    torch.manual_seed(0)
    with pytest.raises(ReplayError, match=f"{re.escape(expected(kind))}.*{advice}"):
        hf.Trainer(config(tmp_path), policy=kind()).run()


def test_a_policy_without_memory_is_not_stopped(tmp_path: Path):
    """Law 1 holds for it: what it gets wrong is for the conformance suite and the doctor to say."""
    assert expected(holdfast_policies.Memoryless) is None
    settings = config(tmp_path)
    env = envs.make(settings.env, 4, env_kwargs=settings.env_kwargs)
    policy = holdfast_policies.Memoryless(env.single_observation_space, env.single_action_space, hidden_size=8)
    assert hf.Trainer(settings, env=env, policy=policy).run().stopped_by == "finished"


def test_batch_statistics_stop_the_run_too_where_no_rollout_step_fails():
    torch.manual_seed(0)
    env = envs.make("holdfast/RepeatPreviousEasy-v0", 4)  # never truncated: no single row is bootstrapped
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    policy.trunk.append(nn.BatchNorm1d(8))
    segment = next(hf.collect(env, policy, 16))
    with pytest.raises(ReplayError, match=r"does not replay.*\n.*\n.*BatchNorm1d \(trunk\.2\) in training mode"):
        replay_check.check_policy(policy, segment)


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(8)])
def test_the_same_layers_set_to_eval_are_no_trouble(tmp_path: Path, layer: nn.Module):
    assert hf.Trainer(config(tmp_path), policy=holdfast_policies.WithLayer(layer.eval())).run().stopped_by == "finished"


def test_weights_that_changed_after_the_rollout_have_no_usual_cause(tmp_path: Path):
    class Nudge(hf.Callback):
        def on_rollout_end(self, trainer: Any, segment: Any) -> None:
            with torch.no_grad():
                trainer.policy.actor.bias.add_(torch.tensor([0.0, 0.1, 0.2]))

    with pytest.raises(ReplayError, match="weights changed after the rollout"):
        hf.Trainer(config(tmp_path), callbacks=[Nudge()]).run()


def test_numbers_that_are_not_finite_are_named_as_such():
    env = vector_env(AutoresetMode.SAME_STEP, *LENGTHS)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    segment = next(hf.collect(env, policy, 8))
    segment.obs[3, 1] = torch.nan
    with pytest.raises(ReplayError, match="are NaN at step t=3, environment 1"):
        replay_check.check_policy(policy, segment)


@pytest.mark.parametrize("bptt", [None, 4])
def test_the_place_is_named_as_step_and_environment_of_the_segment(bptt: int | None):
    torch.manual_seed(0)
    env = vector_env(AutoresetMode.SAME_STEP, *LENGTHS)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    segment = next(hf.collect(env, policy, 16, bptt=bptt))
    segment.log_prob[13, 1] += 1.0
    nearest = max(t for t in range(14) if segment.resets[t, 1])
    with pytest.raises(ReplayError) as stopped:
        replay_check.check_policy(policy, segment, partial(replay_difference, policy, length=bptt))
    assert "at step t=13, environment 1" in str(stopped.value)
    assert f"nearest episode start is at t={nearest}" in str(stopped.value)


# --- healthy runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("bptt", [None, 4])
def test_a_healthy_run_has_a_gap_below_the_tolerance_in_every_update(tmp_path: Path, core: str, bptt: int | None):
    settings = config(tmp_path, core=core, bptt=bptt, learning_rate=0.02, total_steps=4 * 16 * 8)
    hf.Trainer(settings).run()
    gaps = [float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")]
    assert len(gaps) == 8 and max(gaps) < 1e-5


@pytest.mark.parametrize("reset", ["zero", "learned", "detach", "never"])
@pytest.mark.parametrize("critic_core", ["shared", "separate", "none"])
def test_a_healthy_run_in_every_reset_mode(tmp_path: Path, reset: str, critic_core: str):
    hf.Trainer(config(tmp_path, reset=reset, critic_core=critic_core, num_layers=2, bptt=8, learning_rate=0.02)).run()
    assert max(float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_a_healthy_run_on_gymnasiums_environments_in_every_mode(tmp_path: Path, mode: AutoresetMode):
    env = vector_env(mode, *LENGTHS)
    hf.Trainer(config(tmp_path, num_envs=2), env=env).run()
    gaps = [float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")]
    assert max(gaps) < 1e-5


def test_a_healthy_run_with_masks_boxes_and_previous_actions(tmp_path: Path):
    box = spaces.Box(-0.5, 0.5, (2,), np.float32)
    inputs = ("obs", "prev_action", "prev_reward")
    masked = vector_env(AutoresetMode.NEXT_STEP, *LENGTHS, masks="info")
    boxed = vector_env(AutoresetMode.SAME_STEP, *LENGTHS, action_space=box)
    for name, env in (("masked", masked), ("boxed", boxed)):
        hf.Trainer(config(tmp_path / name, num_envs=2, inputs=inputs), env=env).run()
        assert max(float(row["memory/replay_gap"]) for row in read_progress(tmp_path / name / "run")) < 1e-5


def test_half_precision_stays_within_its_own_tolerance(tmp_path: Path):
    hf.Trainer(config(tmp_path, precision="bf16", learning_rate=0.02)).run()
    gaps = [float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")]
    assert max(gaps) < 1e-2
