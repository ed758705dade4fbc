"""Rollouts with the policy's step in C: what `policy.act` gives, for every core, reset mode, action space and mask."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import holdfast as hf
from holdfast.engines import choose
from holdfast.engines.native import NativeActing, native_step_obstacle
from holdfast.engines.native_parts import NativeSteps
from holdfast.kernels.cpu import recurrence as native
from holdfast.rollout.collector import Acting, Collector
from holdfast.rollout.segment import PER_STEP
from holdfast.state import leaves
from ppo_parts import make_ppo

pytestmark = pytest.mark.skipif(not native.in_use(), reason="needs the compiled CPU kernel")

BOX = spaces.Box(-2.0, 3.0, (2,), np.float32)
OBS = spaces.Box(-1, 1, (3,), np.float32)
POLICIES: list[tuple[Any, dict[str, Any]]] = [
    (spaces.Discrete(4, start=2), dict(core="lstm")),
    (
        spaces.Discrete(3),
        dict(core="gru", reset="learned", critic_core="separate", head_sizes=(8, 8), activation="relu"),
    ),
    (spaces.Discrete(3), dict(core="lstm", reset="learned", normalize_value=True)),
    (spaces.Discrete(3), dict(core="lstm", reset="detach", critic_core="none", encoder_sizes=())),
    (spaces.Discrete(3), dict(core="gru", reset="never", normalize_obs=True)),
    (spaces.Discrete(3), dict(core=None, head_sizes=(8,))),
    (spaces.MultiDiscrete([2, 3]), dict(core="gru")),
    (spaces.MultiBinary(3), dict(core="lstm", critic_core="separate")),
    (BOX, dict(core="lstm", scale_actions=True)),
    (BOX, dict(core="gru", squash_actions=True, initial_std=0.5)),
]


def make_policy(space: Any, options: dict[str, Any], seed: int) -> hf.ActorCritic:
    torch.manual_seed(seed)
    policy = hf.ActorCritic(OBS, space, hidden_size=20, **options)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.2 * torch.randn_like(p))
    if options.get("normalize_obs"):
        policy.update_normalizer(torch.randn(50, 3) * 3 + 1)
    if policy.value_scale is not None:
        policy.update_value_scale(torch.randn(50) * 4 + 7)
    return policy


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("space", "options"), POLICIES)
def test_steps_are_those_of_the_policy(space: Any, options: dict[str, Any], masked: bool):
    if masked and isinstance(space, spaces.Box):
        pytest.skip("Box actions take no mask")
    B, seed = 5, POLICIES.index((space, options))
    policy = make_policy(space, options, seed)
    assert native_step_obstacle(policy) is None
    memory, steps = hf.Memory(policy.core), NativeSteps(policy, B)
    state = policy.initial_state(B)
    correlated = isinstance(space, spaces.Box) and seed % 2 == 0
    for t in range(12):
        obs, resets = torch.randn(B, 3), torch.rand(B) < 0.3
        mask = (torch.rand(B, policy.actor.out_features) < 0.7) if masked else None
        if mask is not None:
            mask[:, [0, -1]] = True  # something is allowed for every head
        noise = torch.randn(B, 2) if correlated else None
        torch.manual_seed(t)
        expected = policy.act(
            obs, resets, memory=memory, action_mask=mask, **({} if noise is None else {"noise": noise})
        )
        torch.manual_seed(t)
        before = [leaf.clone() for leaf in leaves(state)]
        found, new = steps.act(obs, state, resets, mask, noise)
        assert all(torch.equal(a, b) for a, b in zip(before, leaves(state))), "a state that was handed out stays"
        state = new
        torch.testing.assert_close(found.action, expected.action, rtol=1e-5, atol=1e-6)
        for name in ("log_prob", "value"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(leaves(state), leaves(memory.take(B)[0]), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
            assert mine.shape == theirs.shape


class Noisy(gym.Env[Any, Any]):
    """Random observations; an episode is truncated or terminated at random."""

    observation_space, action_space = OBS, spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        ends = self.np_random.random(2) < 0.1
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), float(action), bool(ends[0]), bool(ends[1]), {}


def rollouts(kind: type[Acting], policy: hf.ActorCritic, mode: AutoresetMode, seed: int) -> list[hf.Segment]:
    torch.manual_seed(seed)
    env = SyncVectorEnv([Noisy] * 4, autoreset_mode=mode)
    collector = Collector(env, policy, 12, bptt=4, seed=seed, acting=kind)
    return [collector.rollout() for _ in range(3)]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_segments_are_those_of_the_collector_and_replay(mode: AutoresetMode):
    policy = make_policy(spaces.Discrete(3), dict(core="lstm", critic_core="separate"), 3)
    pairs = zip(*(rollouts(kind, policy, mode, 5) for kind in (NativeActing, Acting)))
    for ours, theirs in pairs:
        for name in (*PER_STEP, "start_state", "chunk_states"):
            if getattr(theirs, name) is not None:
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-4, atol=1e-5)
        assert (ours.episode_returns, ours.episode_lengths) == (theirs.episode_returns, theirs.episode_lengths)
        with torch.no_grad():
            again = policy.evaluate(ours.obs, ours.actions, ours.start_state, ours.resets)
        assert float((again.log_prob - ours.log_prob).abs().max()) < 1e-5, "law 1"


def test_weights_that_move_between_rollouts_are_used():
    policy = make_policy(spaces.Discrete(3), dict(core="lstm"), 4)
    env = SyncVectorEnv([Noisy] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    collector = Collector(env, policy, 4, seed=1, acting=NativeActing)
    collector.rollout()
    policy.load_state_dict(make_policy(spaces.Discrete(3), dict(core="lstm"), 5).state_dict())
    for p in policy.parameters():
        p.data = p.data.clone()  # elsewhere in memory
    segment = collector.rollout()
    with torch.no_grad():
        again = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
    assert float((again.value - segment.value).abs().max()) < 1e-5


class Own(hf.ActorCritic):
    def act(self, *args: Any, **options: Any) -> Any:
        return super().act(*args, **options)


def test_what_c_does_not_compute_is_left_to_the_policy():
    calls = []
    policy = make_policy(spaces.Discrete(3), dict(core="lstm"), 6)
    env = SyncVectorEnv([Noisy] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    ppo, engines = make_ppo(policy, hf.TrainConfig(num_envs=2, num_steps=4, minibatches=1))
    collector = engines.collector(env, policy, ppo, seed=1)
    hook = policy.trunk.register_forward_hook(lambda *_: calls.append(1))
    collector.rollout()
    by_the_policy = len(calls)
    assert by_the_policy >= 5, "each step, the value after the last, and those of truncated episodes"
    hook.remove()
    collector.rollout()
    assert len(calls) == by_the_policy
    assert native_step_obstacle(Own(OBS, spaces.Discrete(3))) == "Own overrides act"
    deep = hf.ActorCritic(OBS, spaces.Discrete(3), num_layers=2)
    assert native_step_obstacle(deep) == "the core has several layers"
    for made, engine in ((policy, choose.STEP_IN_C), (deep, choose.STEP_BY_STEP)):
        ppo, engines = make_ppo(made, hf.TrainConfig(num_envs=2, num_steps=4, minibatches=1))
        collector = engines.collector(env, made, ppo, seed=1)
        assert engines.rollout.engine == engine
        assert isinstance(engines.acting(collector), NativeActing) == (made is policy)
