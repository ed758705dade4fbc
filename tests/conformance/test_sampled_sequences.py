"""The laws on sequences that a buffer samples from rollouts that were really played, over every core."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import holdfast as hf
from conformance.episodes import assert_close
from conformance.policies import ACTIONS, loud
from cores.all_cores import CONFORMING, core_of
from holdfast.state import leaves, tree_map

SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
CUTS = [(kind, reset) for kind, reset in CONFORMING if reset in ("zero", "learned")]
PLAYED = [(kind, reset, mode) for kind, reset in CUTS for mode in (SAME, NEXT)] + [
    (kind, reset, NEXT) for kind, reset in CONFORMING if reset in ("never", "detach")
]
"""Cores and autoreset modes that a buffer takes: a state that goes on over resets needs rows that were played."""
PLAYED += [("lstm", "zero", DISABLED), ("window", "zero", DISABLED)]
LENGTH = 14


class Noise(gym.Env[Any, Any]):
    """Random observations in episodes of 1 to 7 steps that end in every way; with one observation that is NaN, if asked for."""

    observation_space = spaces.Box(-10, 10, (3,), np.float32)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, number: int, nan_at: int = -1) -> None:
        self.random, self.nan_at, self.count = np.random.default_rng(number), nan_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.left, self.end = int(self.random.integers(1, 8)), int(self.random.integers(1, 4))
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        over, reward = self.left == 0, float(self.random.normal())
        return self._see(), reward, over and bool(self.end & 1), over and bool(self.end & 2), {}

    def _see(self) -> Any:
        self.count += 1
        obs = self.random.normal(size=3).astype(np.float32)
        return obs * np.nan if self.count == self.nan_at else obs


@cache
def played(
    kind: str, reset: str, mode: AutoresetMode, nan_at: int = -1
) -> tuple[Any, list[hf.Segment], hf.SequenceBuffer]:
    """A policy, its rollouts, and a buffer that holds some of them. In environment 1 an observation may be NaN."""
    torch.manual_seed(0)
    policy = hf.ActorCritic(Noise.observation_space, Noise.action_space, core=core_of(kind, reset), encoder_sizes=(6,))
    envs = [Noise(0), Noise(1, nan_at), Noise(2)]
    vector = SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=mode)
    records = ("log_prob", "value", "final_obs")
    collector = hf.Collector(vector, loud(policy), 12, bptt=4, seed=1, gamma=None, records=records)  # type: ignore[arg-type]
    buffer, segments = hf.SequenceBuffer(3 * 50, 3), []
    for _ in range(6):
        segments.append(collector.rollout())
        buffer.add(segments[-1])
    return policy, segments, buffer


def name(obs: torch.Tensor) -> bytes:
    return obs.numpy().tobytes()


def recorded(segments: list[hf.Segment]) -> tuple[dict[bytes, Any], dict[bytes, float]]:
    """What the rollout gave, by observation: log-probability and value of steps; V of final observations that were not played."""
    steps, finals = {}, {}
    for segment in segments:
        for t in range(segment.num_steps):
            for b in range(segment.num_envs):
                key = name(segment.obs[t, b])
                steps[key] = float(segment.log_prob[t, b]), float(segment.value[t, b])
                if segment.final_obs is not None and segment.truncated[t, b]:
                    finals[name(segment.final_obs[t, b])] = float(segment.final_value[t, b])
    return steps, finals


@pytest.mark.parametrize(("kind", "reset", "mode"), PLAYED)
def test_sampled_sequences_give_what_the_rollout_gave(kind: str, reset: str, mode: AutoresetMode):
    """Law 1, from the stored start and over every end inside; a final row gives V(final observation)."""
    policy, segments, buffer = played(kind, reset, mode)
    steps, finals = recorded(segments)
    batch = buffer.sample(24, LENGTH)
    out = policy.evaluate(batch.obs, batch.actions, batch.start_state, batch.resets)
    seen = [0, 0]
    for s in range(24):
        for t in range(LENGTH + 1):
            key = name(batch.obs[t, s])
            if key in finals:
                assert float(out.value[t, s].detach()) == pytest.approx(finals[key], abs=1e-5)
                assert not batch.valid[t, s] and not batch.resets[t, s] and batch.resets[t + 1 :][:1, s].all()
                seen[1] += 1
            else:
                log_prob, value = steps[key]
                assert float(out.value[t, s].detach()) == pytest.approx(value, abs=1e-5)
                assert float(out.log_prob[t, s].detach()) == pytest.approx(log_prob, abs=1e-5)
                seen[0] += 1
    assert seen[0] > 200 and (mode == NEXT or seen[1] > 20)
    assert bool(batch.resets[1:].any(0).all()), "every sequence runs over an end"


def gradients(policy: Any, total: torch.Tensor) -> list[torch.Tensor]:
    parameters = list(policy.parameters())
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]


@pytest.mark.parametrize(("kind", "reset"), CUTS)
def test_a_sampled_sequence_is_its_episodes_one_after_another(kind: str, reset: str):
    """Law 2: values and gradients are those of each episode alone, from a fresh state; the first goes on from the stored start."""
    policy, _, buffer = played(kind, reset, SAME)
    batch = buffer.sample(6, LENGTH)
    weight = torch.randn(LENGTH + 1, 6, generator=torch.Generator().manual_seed(1))
    whole = policy.unroll(batch.obs, batch.start_state, batch.resets).value
    alone, total = torch.zeros_like(whole), torch.zeros(())
    for s in range(6):
        starts = sorted({0, *batch.resets[:, s].nonzero().squeeze(1).tolist()})
        for first, last in zip(starts, [*starts[1:], LENGTH + 1]):
            fresh = bool(batch.resets[first, s])
            start = policy.initial_state(1) if fresh else tree_map(lambda x, s=s: x[s : s + 1], batch.start_state)
            obs = batch.obs[first:last, s : s + 1]
            value = policy.unroll(obs, start, torch.zeros(last - first, 1, dtype=torch.bool)).value
            alone[first:last, s] = value.squeeze(1).detach()
            total = total + (value.squeeze(1) * weight[first:last, s]).sum()
    assert_close(whole.detach(), alone)
    for ours, theirs in zip(gradients(policy, (whole * weight).sum()), gradients(policy, total)):
        assert_close(ours, theirs, atol=1e-4 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize(("kind", "reset", "mode"), PLAYED)
def test_gradients_of_sampled_sequences_stay_in_their_episode_and_column(kind: str, reset: str, mode: AutoresetMode):
    policy, _, buffer = played(kind, reset, mode)
    batch = buffer.sample(8, LENGTH)
    obs = batch.obs.clone().requires_grad_()
    start = tree_map(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x, batch.start_state)
    value = policy.unroll(obs, start, batch.resets).value
    for s in (0, 5):
        last = int(batch.resets[:, s].nonzero().max())  # the first row of the last episode
        wanted = [obs, *(x for x in leaves(start) if x.is_floating_point())]
        of_obs, *of_start = torch.autograd.grad(value[last:, s].sum(), wanted, retain_graph=True, allow_unused=True)
        others = torch.arange(8) != s
        assert float(of_obs[:, others].abs().max()) == 0
        crosses = float(of_obs[:last, s].abs().max()) + sum(float(g.abs().max()) for g in of_start if g is not None)
        assert (crosses > 0) == (reset == "never" and last > 0), f"{crosses} crosses the reset at {last}"
        starts = sorted({0, *batch.resets[:, s].nonzero().squeeze(1).tolist()})
        first, end = max(zip(starts, [*starts[1:], LENGTH + 1]), key=lambda span: span[1] - span[0])
        (long,) = torch.autograd.grad(value[end - 1, s], obs, retain_graph=True)
        earlier = max(first, end - 4)  # a window holds few steps
        assert end - first > 2 and float(long[earlier, s].abs().max()) > 0, "inside an episode gradients flow"


@pytest.mark.parametrize(("kind", "reset"), CUTS)
def test_nan_in_one_environment_touches_nothing_of_the_others(kind: str, reset: str):
    """The same rollouts with and without a NaN in environment 1: rows and starts of 0 and 2 are bitwise equal, and so are values."""
    (policy, _, clean), (_, _, spoiled) = (played(kind, reset, SAME, nan_at) for nan_at in (-1, 70))
    flags = [buffer.rows["flags"][:-1].view(3, -1) for buffer in (clean, spoiled)]
    lost = (flags[0] & 8 != 0) & (flags[1] & 8 == 0)
    assert int(lost[1].sum()) > 0 and not bool(lost[[0, 2]].any())
    for ours, theirs in zip(
        leaves((clean.rows["obs"], clean.rows["flags"])), leaves((spoiled.rows["obs"], spoiled.rows["flags"]))
    ):
        a, b = (x[:-1].view(3, 50, -1)[[0, 2]] for x in (ours, theirs))
        assert torch.equal(a, b)
    for ours, theirs in zip(leaves(clean.starts.states), leaves(spoiled.starts.states)):
        assert torch.equal(ours[:, [0, 2]], theirs[:, [0, 2]])
    batch = spoiled.sample(30, LENGTH)
    value = policy.unroll(batch.obs, batch.start_state, batch.resets).value
    assert bool(value.isfinite().all()) and not math.isnan(float(batch.rewards.sum()))
    assert all(bool(g.isfinite().all()) for g in gradients(policy, torch.where(batch.valid, value, 0.0).sum()))


@pytest.mark.parametrize(("kind", "reset"), CUTS)
def test_a_truncated_step_is_worth_its_final_observation_and_nothing_behind_it(kind: str, reset: str):
    """One-step targets of sampled sequences, against V(final observation) of the rollout; with SAME_STEP autoreset."""
    policy, segments, buffer = played(kind, reset, SAME)
    steps, finals = recorded(segments)
    batch = buffer.sample(24, LENGTH)
    after = policy.unroll(batch.obs, batch.start_state, batch.resets).value[1:].detach()
    used = torch.where(batch.terminated[:-1], 0.0, after)
    bootstraps = 0
    for s in range(24):
        for t in range(LENGTH):
            if not batch.valid[t, s]:
                continue
            key = name(batch.obs[t + 1, s])
            wanted = 0.0 if batch.terminated[t, s] else finals[key] if batch.truncated[t, s] else steps[key][1]
            assert float(used[t, s]) == pytest.approx(wanted, abs=1e-5)
            bootstraps += bool(batch.truncated[t, s] & ~batch.terminated[t, s])
    assert bootstraps > 5
