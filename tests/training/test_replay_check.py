"""The replay check stops a run whose training leg differs from its rollout, and says what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

import holdfast as hf
from counting_env import MODES, vector_env
from holdfast import envs
from holdfast.policies.heads import Categorical
from holdfast.runs.log import read_progress
from holdfast.state import tree_map
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


class Tamper(hf.Callback):
    """Changes each segment before it is trained on, as a bug would."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def on_rollout_end(self, trainer: Any, segment: Any) -> None:
        self.change(segment)


def words_of(folder: Path, change: Any, **settings: Any) -> str:
    """What a run says when it stops."""
    with pytest.raises(ReplayError) as stopped:
        hf.Trainer(config(folder, **settings), callbacks=[Tamper(change)]).run()
    text = str(stopped.value)
    assert text.startswith("training does not replay the rollout") and "environment" in text
    return text


def late(segment: Any) -> None:
    resets = torch.zeros_like(segment.resets)
    resets[1:] = segment.resets[:-1]
    segment.resets = resets


def early(segment: Any) -> None:
    resets = torch.zeros_like(segment.resets)
    resets[:-1] = segment.resets[1:]
    segment.resets = resets


def dropped(segment: Any) -> None:
    segment.resets = torch.zeros_like(segment.resets)


def from_zeros(segment: Any) -> None:
    segment.start_state = tree_map(torch.zeros_like, segment.start_state)
    segment.chunk_states = [tree_map(torch.zeros_like, state) for state in segment.chunk_states]


# --- injected bugs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("bptt", [None, 4])
def test_resets_late_by_one_stop_the_run(tmp_path: Path, core: str, bptt: int | None):
    assert "late by one" in words_of(tmp_path, late, core=core, bptt=bptt)


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("bptt", [None, 4])
def test_resets_early_by_one_stop_the_run(tmp_path: Path, core: str, bptt: int | None):
    assert "early by one" in words_of(tmp_path, early, core=core, bptt=bptt)


def test_an_off_by_one_is_found_in_the_first_update_at_the_size_people_train(tmp_path: Path):
    words_of(tmp_path, late, hidden_size=128, replay_check_every=1000)
    assert read_progress(tmp_path / "run") == [], "stopped before the first optimiser step"


def test_dropped_resets_stop_the_run(tmp_path: Path):
    assert "some are missing" in words_of(tmp_path, dropped)


def test_truncations_that_do_not_reset_stop_the_run():
    torch.manual_seed(0)
    env = vector_env(AutoresetMode.SAME_STEP, *LENGTHS)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    segment = next(hf.collect(env, policy, 16))
    began_by_truncation = torch.zeros_like(segment.resets)
    began_by_truncation[1:] = segment.truncated[:-1]
    segment.resets = segment.resets & ~began_by_truncation
    with pytest.raises(ReplayError, match="some are missing"):
        replay_check.check(policy, segment)


def test_training_from_zeros_stops_the_run(tmp_path: Path):
    text = words_of(tmp_path, from_zeros)
    assert "the stored start state is not the one the rollout had (it is all zeros)" in text
    assert len(read_progress(tmp_path / "run")) == 1, "the first rollout does begin from zeros"


def test_a_rollout_that_began_from_zeros_though_its_stored_state_did_not_stops_the_run(tmp_path: Path):
    def stale(segment: Any) -> None:
        segment.start_state = tree_map(lambda s: s + 0.5, segment.start_state)
        segment.chunk_states = [segment.start_state]
        segment.resets[0] = False

    assert "the gap vanishes from a zero start state" in words_of(tmp_path, stale)


class ForgetsToReset(hf.ActorCritic):
    """Its rollout ignores the flags."""

    def act(self, obs: Any, resets: Any = None, *args: Any, **options: Any) -> Any:
        return super().act(obs, None, *args, **options)


def test_a_rollout_that_never_resets_stops_the_run(tmp_path: Path):
    settings = config(tmp_path)
    env = envs.make(settings.env, 4, env_kwargs=settings.env_kwargs)
    policy = ForgetsToReset(env.single_observation_space, env.single_action_space, "lstm", 8)
    with pytest.raises(ReplayError, match="the rollout never reset"):
        hf.Trainer(settings, env=env, policy=policy).run()


class Mine(hf.RecurrentPolicy):
    """A user's policy with a layer in its encoder."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(core=hf.LSTM(8, 8))
        self.first, self.layer, self.out = nn.Linear(4, 8), layer, nn.Linear(8, 4)

    def encode(self, obs: Tensor) -> Tensor:
        return self.layer(self.first(obs))

    def decode(self, features: Tensor) -> tuple[Any, Tensor]:
        out = self.out(features)
        return Categorical(out[:, :3]), out[:, 3]


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


@pytest.mark.parametrize(
    "layer, words",
    [
        (nn.Dropout(0.1), r"Dropout \(layer\) in training mode.*remove them from the policy, or set them to eval\(\)"),
        (nn.BatchNorm1d(8), r"BatchNorm1d \(layer\) in training mode.*batch statistics"),
        (Noise(), "two evaluations of the same segment differ"),
    ],
)
def test_random_and_batch_dependent_layers_in_a_users_encoder_stop_the_run(
    tmp_path: Path, layer: nn.Module, words: str
):
    torch.manual_seed(0)
    with pytest.raises(ReplayError, match=words):
        hf.Trainer(config(tmp_path), policy=Mine(layer)).run()


def test_batch_statistics_stop_the_run_too_where_no_rollout_step_fails():
    torch.manual_seed(0)
    env = envs.make("holdfast/RepeatPreviousEasy-v0", 4)  # never truncated: no single row is bootstrapped
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    policy.trunk.append(nn.BatchNorm1d(8))
    segment = next(hf.collect(env, policy, 16))
    with pytest.raises(ReplayError, match=r"does not replay.*\n.*\n.*BatchNorm1d \(trunk\.2\) in training mode"):
        replay_check.check(policy, segment)


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(8)])
def test_the_same_layers_set_to_eval_are_no_trouble(tmp_path: Path, layer: nn.Module):
    assert hf.Trainer(config(tmp_path), policy=Mine(layer.eval())).run().stopped_by == "finished"


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
        replay_check.check(policy, segment)


@pytest.mark.parametrize("bptt", [None, 4])
def test_the_place_is_named_as_step_and_environment_of_the_segment(bptt: int | None):
    torch.manual_seed(0)
    env = vector_env(AutoresetMode.SAME_STEP, *LENGTHS)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    segment = next(hf.collect(env, policy, 16, bptt=bptt))
    segment.log_prob[13, 1] += 1.0
    nearest = max(t for t in range(14) if segment.resets[t, 1])
    with pytest.raises(ReplayError) as stopped:
        replay_check.check(policy, segment, bptt=bptt)
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
