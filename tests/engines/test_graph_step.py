"""Rollouts in a device environment that is not ours: the policy's step is a captured graph. Most are skipped without a GPU."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import holdfast as hf
from holdfast.engines import graph_step
from holdfast.engines.cuda_graph import NotCapturable
from holdfast.engines.graph_step import StepGraphCollector
from holdfast.rollout.collector import Collector
from holdfast.state import leaves
from holdfast.training import replay_check

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class DriftEnv:
    """Observations drift at random, actions earn their distance to them. A fiftieth of the episodes end at each step, half of
    these by truncation. Everything is a tensor on the device, and reward and observation tensors are reused."""

    def __init__(self, num_envs: int, size: int = 8, actions: int = 3, device: str = "cuda") -> None:
        self.num_envs, self.device = num_envs, device
        self.single_observation_space = spaces.Box(-5, 5, (size,))
        self.single_action_space = spaces.Box(-1, 1, (actions,))
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._obs = torch.zeros(num_envs, size, device=device)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        self._generator = torch.Generator(self.device).manual_seed(seed or 0)
        self._obs.normal_(generator=self._generator)
        return self._obs, {}

    def step(self, actions: torch.Tensor) -> Any:
        shape, random = self._obs.shape, self._generator
        rewards = -(self._obs[:, : actions.shape[1]] - actions).abs().mean(1)
        final = self._obs + 0.3 * torch.randn(shape, device=self.device, generator=random)
        fate = torch.rand(shape[0], device=self.device, generator=random)
        fresh = torch.randn(shape, device=self.device, generator=random)
        self._obs.copy_(torch.where((fate < 0.02).unsqueeze(1), fresh, final))
        return self._obs, rewards, fate < 0.01, (fate >= 0.01) & (fate < 0.02), {"final_obs": final}


def collectors(kind: type[Collector], core: str, **options: Any) -> tuple[hf.ActorCritic, Collector]:
    torch.manual_seed(3)
    env: Any = DriftEnv(96)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core, hidden_size=32).cuda()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return policy, kind(env, policy, 24, seed=5, **options)


@needs_gpu
@pytest.mark.parametrize("core", ["lstm", "gru", "window"])
def test_what_is_trained_is_what_the_captured_step_played(core: str):
    policy, collector = collectors(StepGraphCollector, core, noise_correlation=0.5)
    for _ in range(3):
        segment = collector.rollout()
        assert bool(segment.truncated.any()) and bool(segment.resets[1:].any())
        assert replay_check.measure(policy, segment).size < 1e-3


@needs_gpu
def test_a_truncated_step_bootstraps_from_the_value_of_its_last_observation():
    """With the same random numbers in the environment, a policy without noise plays the same in both collectors."""
    segments = []
    for kind in (Collector, StepGraphCollector):
        policy, collector = collectors(kind, "lstm", gamma=0.9)
        with torch.no_grad():
            policy.log_std.fill_(-20.0)
        segments += [collector.rollout(), collector.rollout()]
    for one, other in zip(segments[:2], segments[2:]):
        assert torch.equal(one.resets, other.resets)
        for name in ("rewards", "value", "returns", "advantage"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-3, atol=1e-3)
        assert one.episode_lengths == other.episode_lengths
        for a, b in zip(leaves(one.start_state), leaves(other.start_state)):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@needs_gpu
def test_weights_that_change_after_the_capture_are_used():
    policy, collector = collectors(StepGraphCollector, "lstm")
    collector.rollout()
    with torch.no_grad():
        policy.critic.bias.add_(100.0)
    assert float(collector.rollout().value.min()) > 50.0


@needs_gpu
def test_gymnasium_environments_train_with_it(tmp_path: Any):
    config = hf.TrainConfig(
        env="CartPole-v1", num_envs=4, num_steps=16, total_steps=4 * 16 * 3, minibatches=2, epochs=1, device="cuda",
        run_dir=str(tmp_path / "run"), quiet=True, final_eval_episodes=1, tensorboard=False, replay_check_every=1,
    )  # fmt: skip
    trainer = hf.Trainer(config)
    assert isinstance(trainer.collector, StepGraphCollector) and isinstance(trainer.env, gym.vector.VectorEnv)
    trainer.run()


class Looks(hf.ActorCritic):
    """Waits for the GPU in every step."""

    def decode(self, features: torch.Tensor, action_mask: Any = None) -> Any:
        if features.abs().max() > 1e9:
            raise ValueError("too large")
        return super().decode(features, action_mask)


@needs_gpu
def test_a_policy_that_waits_for_the_gpu_plays_step_by_step_and_the_line_is_named():
    env: Any = DriftEnv(16)
    policy = Looks(env.single_observation_space, env.single_action_space, hidden_size=16).cuda()
    collector = StepGraphCollector(env, policy, 12, seed=5)
    for _ in range(2):
        segment = collector.rollout()
        assert replay_check.measure(policy, segment).size < 1e-3
    assert collector.slowed_by is not None and collector.slowed_by.startswith("test_graph_step.py:")
    assert "waits for the GPU (if features.abs().max() > 1e9:)" in collector.slowed_by


@pytest.mark.parametrize("seed", [1, 2])
def test_what_cannot_be_captured_is_played_as_the_collector_plays_it(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Also in steps in which no episode is truncated."""

    def refuse(collector: StepGraphCollector) -> None:
        raise NotCapturable("model.py:3 waits for the GPU (x.item())")

    monkeypatch.setattr(graph_step, "_StepGraphs", refuse)
    segments = []
    for kind in (StepGraphCollector, Collector):
        env: Any = DriftEnv(8, device="cpu")
        torch.manual_seed(seed)
        policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)
        collector = kind(env, policy, 12, seed=seed)
        segments.append([collector.rollout(), collector.rollout()])
        assert collector.slowed_by == (None if kind is Collector else "model.py:3 waits for the GPU (x.item())")
    for one, other in zip(*segments):
        assert not bool(one.truncated.any(1).all())
        for name in ("actions", "value", "returns", "advantage"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
