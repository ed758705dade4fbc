"""The replay check stops a run whose training leg differs from its rollout, and says what differs."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
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
    far = vector_env(AutoresetMode.SAME_STEP, *LENGTHS, action_space=spaces.Box(1000, 1001, (2,), np.float32))
    for name, env in (("masked", masked), ("boxed", boxed), ("far", far)):
        hf.Trainer(config(tmp_path / name, num_envs=2, inputs=inputs), env=env).run()
        assert max(float(row["memory/replay_gap"]) for row in read_progress(tmp_path / name / "run")) < 1e-5


def test_half_precision_stays_within_its_own_tolerance(tmp_path: Path):
    hf.Trainer(config(tmp_path, precision="bf16", learning_rate=0.02)).run()
    gaps = [float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")]
    assert max(gaps) < 1e-2


# --- actions between bounds far from 0, and small deviations -------------------------------------------------------------


class NoisySteps(gymnasium.Env[Any, Any]):
    """Observations are noise; actions lie between any bounds, and those that come are kept."""

    def __init__(self, low: float, high: float) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space, self.came = spaces.Box(low, high, (2,), np.float32), []

    def reset(self, **options: Any) -> Any:
        super().reset(seed=options.get("seed"))
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.came.append(action)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), 0.0, self.np_random.random() < 0.1, False, {}


def rollout_between(low: float, high: float, core: str, seed: int, half: bool = False, **options: Any) -> Any:
    torch.manual_seed(seed)
    env = SyncVectorEnv([partial(NoisySteps, low, high)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core, 16, **options)
    policy.actor.weight.data *= 100  # as after some training: outputs of size 1
    collector = hf.Collector(env, policy, 32, seed=seed, autocast=torch.bfloat16 if half else None)
    collector.rollout()
    return policy, collector.rollout(), env


@pytest.mark.parametrize(("low", "high"), [(1000, 1001), (293, 295), (-2, 2)])
@pytest.mark.parametrize("options", [{"scale_actions": True}, {"squash_actions": True}], ids=["scaled", "squashed"])
@pytest.mark.parametrize("deviation", [1.0, 0.001])
def test_far_bounds_and_small_deviations_are_replayed(low: float, high: float, options: Any, deviation: float):
    for core, seed in (("mlstm", 0), ("lstm", 1), ("window", 2)):
        policy, segment, env = rollout_between(low, high, core, seed, initial_std=deviation, **options)
        assert replay_check.check_policy(policy, segment) < 1e-5
        # `segment.actions` are in the environment's units, and what it got is one of them, clipped.
        last = np.stack([one.came[-1] for one in env.envs])
        np.testing.assert_array_equal(np.clip(segment.actions[-1].numpy(), low, high).astype(np.float32), last)


def test_a_small_deviation_is_replayed_in_half_precision():
    policy, segment, _ = rollout_between(-2, 2, "lstm", 1, half=True, scale_actions=True, initial_std=0.003)
    difference = partial(replay_difference, policy, half_precision=torch.bfloat16)
    assert replay_check.check_policy(policy, segment, difference, half_precision=True) < 1e-1


@pytest.mark.parametrize("deviation", [1.0, 0.001])
def test_shifted_resets_are_found_between_far_bounds_and_with_small_deviations(deviation: float):
    policy, segment, _ = rollout_between(1000, 1001, "lstm", 1, initial_std=deviation, scale_actions=True)
    with pytest.raises(ReplayError, match="late by one"):
        replay_check.check_policy(policy, segment.changed(resets=segment.resets.roll(1, 0)))


def test_a_deviation_of_torchs_normal_counts_as_well():
    class Own(hf.RecurrentPolicy):
        def encode(self, obs: torch.Tensor) -> torch.Tensor:
            return obs

        def decode(self, features: torch.Tensor) -> Any:
            mean = features[:, :2]
            normal = torch.distributions.Normal(mean, torch.full_like(mean, 1e-4))
            return torch.distributions.Independent(normal, 1), features[:, 2]

    torch.manual_seed(0)
    env = SyncVectorEnv([partial(NoisySteps, -1, 1)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = Own(core=hf.MLSTM(2, 8))
    assert replay_check.check_policy(policy, hf.Collector(env, policy, 32, seed=0).rollout()) < 1e-5


def test_far_bounds_cost_a_squashed_action_no_precision():
    space = spaces.Box(100_000, 100_001, (1,), np.float32)
    policy = hf.ActorCritic(spaces.Box(-1, 1, (2,)), space, "none", 8, squash_actions=True)
    u = torch.linspace(-3, 3, 7).unsqueeze(1)
    dist = policy.distribution(u, None)
    near = hf.ActorCritic(spaces.Box(-1, 1, (2,)), spaces.Box(-0.5, 0.5, (1,)), "none", 8, squash_actions=True)
    expected = near.distribution(u, None)
    noise = torch.full_like(u, 0.5)
    torch.testing.assert_close(
        dist.log_prob(dist.sample(noise)), expected.log_prob(expected.sample(noise)), rtol=1e-4, atol=1e-4
    )
    assert dist.log_prob(dist.mode).dtype == dist.entropy().dtype == torch.float32
