"""Rollouts in a device environment that is not ours: the policy's step is a captured graph. Most are skipped without a GPU."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import holdfast as hf
from holdfast.engines.cuda_graph import NotCapturable, copy_into
from holdfast.engines.graph_step import StepGraphActing
from holdfast.rollout.collector import Acting, Collector
from holdfast.state import leaves
from holdfast.training import replay_check
from ppo_parts import make_ppo

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


def collectors(kind: type[Acting], core: str, **options: Any) -> tuple[hf.ActorCritic, Collector]:
    torch.manual_seed(3)
    env: Any = DriftEnv(96)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core, hidden_size=32).cuda()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return policy, Collector(env, policy, 24, seed=5, acting=kind, **options)


@needs_gpu
@pytest.mark.parametrize("core", ["lstm", "gru", "window"])
def test_what_is_trained_is_what_the_captured_step_played(core: str):
    policy, collector = collectors(StepGraphActing, core, noise_correlation=0.5)
    for _ in range(3):
        segment = collector.rollout()
        assert bool(segment.truncated.any()) and bool(segment.resets[1:].any())
        assert replay_check.measure(policy, segment).size < 1e-3


@needs_gpu
def test_a_truncated_step_bootstraps_from_the_value_of_its_last_observation():
    """With the same random numbers in the environment, a policy without noise plays the same in both collectors."""
    segments = []
    for kind in (Acting, StepGraphActing):
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
    policy, collector = collectors(StepGraphActing, "lstm")
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
    assert isinstance(trainer.env, gym.vector.VectorEnv) and isinstance(trainer.env, gym.vector.VectorEnv)
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
    ppo, engines = make_ppo(policy, hf.PPOConfig(num_envs=16, num_steps=12, minibatches=2))
    collector = engines.collector(env, policy, ppo, seed=5)
    for _ in range(2):
        segment = collector.rollout()
        assert replay_check.measure(policy, segment).size < 1e-3
    assert engines.rollout.engine == "step by step" and type(collector.acting) is Acting
    assert "waits for the GPU (if features.abs().max() > 1e9:)" in engines._refused["step"]


class UncapturedActing(StepGraphActing):
    """Calls what a graph would hold where the graph would be replayed, into the same tensors each time."""

    def _capture(self, adapter: Any, state: Any) -> None:
        self._make_room(adapter, state)
        self._step: Any = None
        self._last_value: Any = None
        self._act_graph = _Function(self._replay_act)  # type: ignore[assignment]
        self._value_graph = _Function(self._replay_value)  # type: ignore[assignment]

    def _replay_act(self) -> None:
        new = self._act()
        self._step = tuple(part.clone() for part in new) if self._step is None else self._step
        copy_into(self._step, new)

    def _replay_value(self) -> None:
        new = self._value()
        self._last_value = new.clone() if self._last_value is None else self._last_value
        self._last_value.copy_(new)


class _Function:
    def __init__(self, replay: Any) -> None:
        self.replay = replay


@pytest.mark.parametrize("core", ["lstm", "gru", "window"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_plays_what_the_policy_plays(core: str, seed: int):
    """Without a GPU: with truncated episodes, correlated noise and chunks."""
    segments = []
    for kind in (UncapturedActing, Acting):
        env: Any = DriftEnv(8, device="cpu")
        torch.manual_seed(seed)
        policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core, hidden_size=8)
        collector = Collector(env, policy, 32, bptt=8, seed=seed, noise_correlation=0.5, acting=kind)
        torch.manual_seed(seed)
        segments.append([collector.rollout() for _ in range(3)])
    truncated = 0
    for one, other in zip(*segments):
        truncated += int(other.truncated.sum())
        assert (one.final_value is None) == (other.final_value is None) or core == "window"
        for name in ("actions", "log_prob", "value", "returns", "advantage", "last_value"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-6, msg=name)
        for a, b in zip(leaves(one.chunk_states), leaves(other.chunk_states)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert one.episode_lengths == other.episode_lengths
    assert truncated > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_what_cannot_be_captured_is_played_as_the_policy_plays_it(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Also in steps in which no episode is truncated."""

    def refuse(*_: Any) -> None:
        raise NotCapturable("model.py:3 waits for the GPU (x.item())")

    monkeypatch.setattr(StepGraphActing, "_capture", refuse)
    segments = []
    for on_gpu in (True, False):
        env: Any = DriftEnv(8, device="cpu")
        torch.manual_seed(seed)
        policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)
        ppo, engines = make_ppo(policy, hf.PPOConfig(num_envs=8, num_steps=12, accelerators="on" if on_gpu else "off"))
        engines.on_gpu = on_gpu  # as if
        collector = engines.collector(env, policy, ppo, seed)
        torch.manual_seed(seed)
        segments.append([collector.rollout(), collector.rollout()])
        assert engines.rollout.engine == "step by step"
        assert engines._refused.get("step") == ("model.py:3 waits for the GPU (x.item())" if on_gpu else None)
    for one, other in zip(*segments):
        assert not bool(one.truncated.any(1).all())
        for name in ("actions", "value", "last_value"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
