"""Every option of a collector, in every collector: step by step, with the policy in C, in asynchronous batches, as one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import holdfast as hf
from counting_env import vector_env
from holdfast.algorithms.base import Progress, RunContext
from holdfast.algorithms.ppo import PPO
from holdfast.distributed.ranks import ALONE
from holdfast.engines import choose
from holdfast.envs.base import TorchVectorEnv, Transition
from holdfast.rollout.collector import Collector
from holdfast.rollout.vector_env import input_space
from rollout.test_batch_env import ShuffledEnv
from uncaptured import UncapturedCollector

KINDS = ("step by step", "step by step, the policy in C", "asynchronous batches", "graph")
SEEDS = (0, 1, 2)
BOX = spaces.Box(-1, 1, (2,), np.float32)


class Clock(TorchVectorEnv):
    """Counts the steps of an episode of 7, which is truncated. The last digit says which action is allowed."""

    def __init__(self, num_envs: int, action_space: spaces.Space[Any], masked: bool) -> None:
        super().__init__(num_envs, spaces.Box(0, np.inf, (1,), np.float32), action_space, None)
        if masked:
            self.action_masks = lambda: torch.arange(2) == (self.state % 2)[:, None]

    def draw(self) -> torch.Tensor:
        return torch.zeros(self.num_envs)

    def begin(self, draws: torch.Tensor) -> tuple[Any, Any]:
        return draws.clone(), (draws + 1)[:, None]

    def transition(self, state: Any, actions: torch.Tensor, draws: torch.Tensor) -> Transition:
        over = state + 1 >= 7
        after = torch.where(over, 0.0, state + 1)
        never, final = torch.zeros(self.num_envs, dtype=torch.bool), (state + 2)[:, None]
        return Transition(after, (after + 1)[:, None], torch.ones(self.num_envs), never, over, over, final)


class MaskedShuffledEnv(ShuffledEnv):
    """Like `ShuffledEnv`; only the action `step % 2` is allowed."""

    def action_masks(self) -> np.ndarray[Any, Any]:
        return np.stack([env._mask() for env in self.envs])


def make(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch, actions: Any = None, masked: bool = False, **settings: Any
) -> tuple[Collector, PPO]:
    """A collector and PPO, in the state of `seed`."""
    actions = spaces.Discrete(2) if actions is None else actions
    monkeypatch.setattr(choose, "Collector", UncapturedCollector if kind == "graph" else Collector)
    env: Any
    if kind == "asynchronous batches":
        env = (MaskedShuffledEnv if masked else ShuffledEnv)(6, 2, seed)
        env.single_action_space = actions
    elif kind == "graph":
        env = Clock(6, actions, masked)
    else:
        one = {"ends": ("truncated",), "masks": "method" if masked else None, "action_space": actions}
        env = vector_env(
            AutoresetMode.SAME_STEP, *({**one, "unit": 0.1 * (i + 1), "lengths": (3 + i,)} for i in range(6))
        )
    config = hf.PPOConfig(
        env="", device="cpu", num_envs=6, num_steps=20, bptt=10, epochs=1, minibatches=1, seed=seed, **settings
    )
    config.accelerators = "off" if kind == "step by step" else "on"
    torch.manual_seed(seed)
    seen = input_space(env.single_observation_space, actions, config.inputs or ("obs",))
    policy = hf.ActorCritic(seen, actions, "gru", hidden_size=8)
    engines = choose.Engines(config, torch.device("cpu"))
    ppo = PPO(policy, config, RunContext(ALONE, torch.device("cpu"), seed, engines, 6, actions))
    collector = engines.collector(env, policy, ppo, seed)
    if kind != "graph":
        assert str(engines.rollout).startswith(kind)
    torch.manual_seed(seed)
    return collector, ppo


def weights_after(ppo: PPO, segment: hf.Segment) -> torch.Tensor:
    ppo.start_update(segment, Progress(0, 1000, 0, 10, 0.0))()
    return torch.cat([p.detach().flatten() for p in ppo.policy.parameters()])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_callback_makes_of_the_rewards_is_what_is_learned_from(kind, seed, monkeypatch):
    learned = {}
    for change in ("nothing", "in place", "assigned", "looked at before"):
        collector, ppo = make(kind, seed, monkeypatch)
        ppo.prepare(segment := collector.rollout())
        other = torch.randn(segment.rewards.shape, generator=torch.Generator().manual_seed(seed))
        if change == "looked at before":
            assert segment.advantage.shape == other.shape
        if change == "assigned":
            segment.rewards = other
        elif change != "nothing":
            segment.rewards.copy_(other)
        learned[change] = weights_after(ppo, segment)
    assert torch.equal(learned["in place"], learned["assigned"])
    assert torch.equal(learned["in place"], learned["looked at before"])
    assert (learned["in place"] - learned["nothing"]).abs().max() > 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_assigned_advantages_are_kept(kind, monkeypatch):
    learned = []
    for rewards in (0.0, 5.0):
        collector, ppo = make(kind, 4, monkeypatch)
        ppo.prepare(segment := collector.rollout())
        generator = torch.Generator().manual_seed(4)
        segment.advantage = torch.randn(segment.rewards.shape, generator=generator)
        segment.returns = torch.randn(segment.rewards.shape, generator=generator)
        segment.rewards = torch.full_like(segment.rewards, rewards)
        learned.append(weights_after(ppo, segment))
    assert torch.equal(*learned)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_action_is_played_that_the_mask_forbids(kind, seed, monkeypatch):
    collector, ppo = make(kind, seed, monkeypatch, masked=True)
    for _ in range(3):
        segment = collector.rollout()
        assert segment.action_mask is not None
        allowed = segment.action_mask.gather(2, segment.actions[..., None].long()).squeeze(2)
        assert bool(allowed[segment.valid].all())
        assert int(segment.action_mask[segment.valid].sum(1).max()) == 1, "one of two actions is allowed"
        assert float(ppo.replay_difference(segment).max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_without_masks_both_actions_are_played(kind, monkeypatch):
    segment = make(kind, 0, monkeypatch)[0].rollout()
    assert segment.action_mask is None and 0.1 < float(segment.actions.float().mean()) < 0.9


@pytest.mark.parametrize("correlation", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_as_correlated_as_the_setting_says(kind, correlation, monkeypatch):
    collector, ppo = make(kind, 3, monkeypatch, BOX, noise_correlation=correlation)
    pairs = []
    for _ in range(20):
        segment = collector.rollout()
        out = ppo.policy.unroll(segment.obs, segment.start_state, segment.resets)
        mean = out.dist.mode.detach().view_as(segment.actions)
        noise = segment.actions - mean
        follows = ~segment.resets[1:] & segment.valid[1:] & segment.valid[:-1]
        pairs.append((noise[:-1][follows], noise[1:][follows]))
    before, after = (torch.cat(part).flatten().double() for part in zip(*pairs))
    measured = float(torch.corrcoef(torch.stack([before, after]))[0, 1])
    assert measured == pytest.approx(correlation, abs=0.08)


@pytest.mark.parametrize("kind", KINDS)
def test_previous_actions_and_rewards_are_seen_and_the_rollout_is_replayed_from_every_chunk(kind, monkeypatch):
    inputs = ("obs", "prev_action", "prev_reward")
    collector, ppo = make(kind, 5, monkeypatch, BOX, inputs=inputs)
    for _ in range(3):
        segment = collector.rollout()
        follows = ~segment.resets[1:]
        assert torch.equal(segment.obs["prev_action"][1:][follows], segment.actions[:-1][follows])
        assert torch.equal(segment.obs["prev_reward"][1:][follows], segment.rewards[:-1][follows])
        assert not segment.obs["prev_action"][segment.resets].any() and bool(segment.resets.any())
        assert len(segment.chunk_states) == 2
        assert float(ppo.replay_difference(segment.as_sequences(10)).max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_decides_what_is_played(kind, monkeypatch):
    first, again, other = (make(kind, seed, monkeypatch, BOX)[0].rollout() for seed in (6, 6, 7))
    for name in ("actions", "log_prob", "value", "resets"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert not torch.equal(first.actions, other.actions)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.9, 0.8), (0.5, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_advantages_follow_the_discount_and_bootstrap_where_an_episode_was_truncated(
    kind, gamma, gae_lambda, monkeypatch
):
    collector, ppo = make(kind, 8, monkeypatch, gamma=gamma, gae_lambda=gae_lambda)
    for _ in range(2):
        ppo.prepare(segment := collector.rollout())
        next_value, expected = (
            torch.cat([segment.value[1:], segment.last_value[None]]),
            torch.zeros_like(segment.rewards),
        )
        ended = segment.terminated | segment.truncated
        assert bool(ended.any()) and float(segment.valid.float().mean()) > 0.7  # some begin one step after an end
        for t in reversed(range(len(expected))):
            if segment.final_value is not None:
                next_value[t] = torch.where(segment.truncated[t], segment.final_value[t], next_value[t])
            delta = segment.rewards[t] + gamma * next_value[t] * ~segment.terminated[t] - segment.value[t]
            after = expected[t + 1] if t + 1 < len(expected) else torch.zeros_like(delta)
            expected[t] = (delta + gamma * gae_lambda * after * ~ended[t]) * segment.valid[t]
        torch.testing.assert_close(segment.advantage, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(segment.returns, expected + segment.value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "in C" not in kind])  # half precision is not for C
def test_half_precision_is_used_and_replayed(kind, monkeypatch):
    collector, ppo = make(kind, 9, monkeypatch, precision="bf16")
    exact = make(kind, 9, monkeypatch)[0].rollout().value[0]
    for step in range(2):
        segment = collector.rollout()
        assert float(ppo.replay_difference(segment).max()) < 1e-2
        assert step or 0 < float((segment.value[0] - exact).abs().max()) < 1e-2
