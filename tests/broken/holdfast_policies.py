"""Holdfast policies with a mistake inside: an overridden `step` or `unroll`, or a layer that has no place in a policy."""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor, nn

import holdfast as hf
from broken.base import OBS, Broken, first_line
from conformance.driver import PolicyDriver
from conformance.policies import ACTIONS, loud
from cores.all_cores import core_of
from holdfast.doctor.subjects import Holdfast
from holdfast.policies.heads import Categorical


class NeverResets(hf.ActorCritic):
    """The rollout ignores the flags."""

    def step(self, obs, state, resets=None, **options):
        return super().step(obs, state, None, **options)


class MovesStatisticsDuringTheRollout(hf.ActorCritic):
    """Each step moves the statistics that normalize observations."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("mean", torch.zeros(()))

    def encode(self, obs):
        return super().encode(obs - self.mean)

    def step(self, obs, state, resets=None, **options):
        self.mean += 0.01
        return super().step(obs, state, resets, **options)


class HalfPrecisionInOneLeg(hf.ActorCritic):
    """The rollout runs in bfloat16, training in float32."""

    def step(self, obs, state, resets=None, **options):
        with torch.autocast("cpu", torch.bfloat16, enabled=obs.dtype == torch.float32):
            return super().step(obs, state, resets, **options)


class ClampsInOneLeg(hf.ActorCritic):
    """Training clamps the observations, the rollout does not."""

    def unroll(self, obs, state, resets=None, **options):
        return super().unroll(obs.clamp(-0.3, 0.3), state, resets, **options)


class Memoryless(hf.ActorCritic):
    """It has no core, so nothing is remembered."""

    def __init__(self, *args, core=None, **options):
        super().__init__(*args, core=None, **options)


class WithLayer(hf.RecurrentPolicy):
    """A policy that a user wrote, with a layer of the user's choice in its encoder."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(core=hf.LSTM(8, 8))
        self.first, self.layer, self.out = nn.Linear(OBS, 8), layer, nn.Linear(8, 4)

    def encode(self, obs):
        return self.layer(self.first(obs))

    def decode(self, features):
        out = self.out(features)
        return Categorical(out[:, :3]), out[:, 3]


class Noise(nn.Module):
    """Adds random numbers in every call."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class WithDropout(WithLayer):
    """Dropout is active in both legs."""

    def __init__(self):
        super().__init__(nn.Dropout(0.1))


class WithBatchNorm(WithLayer):
    """BatchNorm in training mode makes an environment's output depend on the others."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(8))


class WithNoise(WithLayer):
    """The encoder adds random numbers."""

    def __init__(self):
        super().__init__(Noise())


def _driver(kind):
    torch.manual_seed(0)
    if issubclass(kind, WithLayer):
        return PolicyDriver(kind(), obs_shape=(OBS,))
    space = spaces.Box(-10, 10, (3,))
    policy = kind(space, spaces.Discrete(ACTIONS), core=core_of("lstm", "zero"), encoder_sizes=(6,))
    return PolicyDriver(loud(policy))


def _subject(kind):
    driver = _driver(kind)
    return Holdfast(driver.policy, driver.obs_shape)


def _healthy():
    return _subject(hf.ActorCritic)


class _WithIdentity(WithLayer):
    def __init__(self):
        super().__init__(nn.Identity())


def _healthy_with_layer():
    return _subject(_WithIdentity)


def _broken(kind, case, doctor, *conformance, replay_check=None):
    return Broken(
        name=f"policy-{kind.__name__}",
        case=case,
        does=first_line(kind),
        doctor=doctor,
        subject=lambda: _subject(kind),
        healthy=_healthy_with_layer if issubclass(kind, WithLayer) else _healthy,
        driver=lambda: _driver(kind),
        conformance=conformance,
        replay_check=replay_check,
    )


_DIFFERS = "No usual cause found. Look for anything that differs between act and evaluate"
_BOUNDARIES = "test_boundaries_at_the_first_and_last_step_of_a_segment_replay"

BROKEN = [
    _broken(
        Memoryless, 4, "memoryless",
        "test_missing_flags_mean_no_reset_and_the_state_evolves",
        "test_flags_one_step_early_or_one_step_late_do_not_replay",
        "test_the_start_state_is_the_one_before_the_reset_and_the_reset_still_happens",
        "test_a_start_state_from_one_step_later_does_not_replay",
        "test_gradients_reach_every_step_inside_an_episode_and_no_other_environment",
        "test_a_row_depends_only_on_its_environment_and_its_past",
        "test_an_unknown_id_is_fresh_and_never_somebody_elses",
        "test_flags_are_a_mask_and_never_an_index",
        "test_after_reset_memory_the_next_step_is_a_first_step",
    ),
    _broken(NeverResets, 6, "never-resets", _BOUNDARIES, replay_check="the rollout never reset"),
    _broken(MovesStatisticsDuringTheRollout, 18, "normaliser-moved", _BOUNDARIES, replay_check=_DIFFERS),
    _broken(HalfPrecisionInOneLeg, 18, "legs-differ", _BOUNDARIES, replay_check=_DIFFERS),
    _broken(
        ClampsInOneLeg, 18, "legs-differ",
        "test_autocast_in_both_legs_replays_within_the_laws_tolerance",
        replay_check=_DIFFERS,
    ),
    _broken(
        WithDropout, 18, "random-training-leg", _BOUNDARIES,
        replay_check="Dropout (layer) in training mode",
    ),
    _broken(
        WithBatchNorm, 18, "batch-statistics", _BOUNDARIES,
        replay_check="BatchNorm1d (layer) in training mode",
    ),
    _broken(
        WithNoise, 18, "random-training-leg", _BOUNDARIES,
        replay_check="two evaluations of the same segment differ",
    ),
]  # fmt: skip
