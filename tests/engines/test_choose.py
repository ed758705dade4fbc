"""Which engine is chosen, and that the reason says what keeps a faster one away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast import envs
from holdfast.algorithms.ppo import ClippedLoss
from holdfast.engines import choose, graph_rollout, graph_update
from holdfast.engines.autograd import Minibatches
from holdfast.engines.cuda_graph import NotCapturable
from holdfast.engines.native import NativeMinibatches
from holdfast.kernels.cpu import recurrence as native
from holdfast.rollout.collector import Acting
from ppo_parts import make_ppo

needs_native = pytest.mark.skipif(not native.in_use(), reason="no native kernel")


class MyPolicy(hf.ActorCritic):
    def decode(self, features: torch.Tensor, action_mask: Any = None) -> Any:
        return super().decode(features, action_mask)


def update_choice(policy: hf.RecurrentPolicy | None = None, **settings: Any) -> choose.Choice:
    policy = policy or hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), hidden_size=8)
    return make_ppo(policy, hf.TrainConfig(**settings))[1].update


@needs_native
def test_the_library_s_own_policy_trains_in_c():
    assert str(update_choice()) == "C, without autograd"


@needs_native
def test_the_reason_names_what_the_policy_does_differently():
    policy = MyPolicy(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), hidden_size=8)
    assert str(update_choice(policy)) == "autograd, because MyPolicy overrides decode"
    assert update_choice(precision="bf16") == ("autograd", "the precision is bf16")


@needs_native
@pytest.mark.parametrize(
    ("core", "named"), [("mingru", "MinGRU"), ("lru", "a Block of LRU"), ("ffm", "a Block of FFM")]
)
def test_a_core_that_the_update_in_c_does_not_know_goes_through_autograd_and_is_named(core: str, named: str):
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), core, hidden_size=8)
    reason = f"the update in C knows LSTM and GRU on the compiled kernel, and the core is {named}"
    assert update_choice(policy) == ("autograd", reason)


@needs_native
def test_the_choice_is_made_again_for_every_update():
    env = envs.make("holdfast/RepeatPreviousEasy-v0", 4)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)
    ppo, engines = make_ppo(policy, hf.TrainConfig(num_envs=4, num_steps=4))
    segment = next(hf.collect(env, policy, 4))
    assert isinstance(ppo.engine_for(segment, ClippedLoss()), NativeMinibatches)
    hook = policy.core.register_forward_hook(lambda *_: None)
    assert type(ppo.engine_for(segment, ClippedLoss())) is Minibatches
    assert engines.update.because == "core has hooks"
    hook.remove()
    assert isinstance(ppo.engine_for(segment, ClippedLoss()), NativeMinibatches)


@needs_native
def test_a_loss_of_another_kind_goes_through_autograd():
    class Mine(ClippedLoss):
        pass

    env = envs.make("holdfast/RepeatPreviousEasy-v0", 4)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)
    ppo, engines = make_ppo(policy, hf.TrainConfig(num_envs=4, num_steps=4))
    assert type(ppo.engine_for(next(hf.collect(env, policy, 4)), Mine())) is Minibatches
    assert engines.update.because == "the update in C knows PPO's loss, and this is Mine"


def test_without_accelerators_the_page_s_loss_and_the_plain_rollout_run(tmp_path: Path):
    """They train what the engines in C train, up to rounding."""
    weights = []
    for accelerators in ("on", "off"):
        config = hf.TrainConfig(
            num_envs=4, num_steps=8, hidden_size=8, total_steps=128, final_eval_episodes=1, tensorboard=False, device="cpu",
            run_dir=str(tmp_path / accelerators), quiet=True, accelerators=accelerators,
        )  # fmt: skip
        trainer = hf.Trainer(config)
        trainer.run()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.policy.parameters()]))
    assert type(trainer.collector.acting) is Acting
    assert trainer.engines == {
        "rollout": "step by step, because accelerators are off",
        "update": "autograd, because accelerators are off",
    }
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_obstacles_of_cuda_graphs():
    gpu = torch.device("cuda")
    not_ours = gym.make_vec("CartPole-v1", 2)
    ours = envs.make("holdfast/RepeatPreviousEasy-v0", 2)
    assert "is not a torch environment" in str(graph_rollout.obstacle(not_ours, gpu))
    assert graph_rollout.obstacle(ours, gpu) == "the environment is not on the GPU"
    assert graph_update.obstacle(8, 4, masked=False) is None
    assert graph_update.obstacle(9, 4, masked=False) == "9 sequences do not divide into 4 equal minibatches"
    assert graph_update.obstacle(8, 1, masked=False) == "one minibatch holds the whole rollout"
    assert graph_update.obstacle(8, 4, masked=True) == "the environment masks actions"


@needs_native
def test_a_run_says_which_engines_it_uses_on_screen_and_in_its_metadata(tmp_path: Path, capsys: Any):
    config = hf.TrainConfig(
        num_envs=4, num_steps=8, hidden_size=8, total_steps=64, final_eval_episodes=1, tensorboard=False, device="cpu",
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    trainer = hf.Trainer(config)
    trainer.run()
    assert "rollout: step by step, the policy in C; update: C, without autograd" in capsys.readouterr().out
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert (
        meta["engines"]
        == trainer.engines
        == {"rollout": "step by step, the policy in C", "update": "C, without autograd"}
    )


def test_an_engine_that_changes_during_a_run_is_announced(tmp_path: Path, capsys: Any):
    class Hooks(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            if trainer.update == 1:
                trainer.policy.core.register_forward_hook(lambda *_: None)

    config = hf.TrainConfig(
        num_envs=4, num_steps=8, hidden_size=8, total_steps=96, final_eval_episodes=1, tensorboard=False, device="cpu",
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    hf.Trainer(config, callbacks=[Hooks()]).run()
    said = capsys.readouterr().out
    if native.in_use():
        assert said.count("update: autograd, because core has hooks") == 1


@needs_native
def test_a_run_resumed_on_another_engine_says_so(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    config = hf.TrainConfig(
        num_envs=4, num_steps=8, hidden_size=8, total_steps=64, final_eval_episodes=1, tensorboard=False, device="cpu",
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    hf.Trainer(config).run()
    hf.Trainer.resume(tmp_path / "run", total_steps=96).run()
    assert "engines have changed" not in capsys.readouterr().out
    monkeypatch.setenv("HOLDFAST_CPU_KERNEL", "portable")
    hf.Trainer.resume(tmp_path / "run", total_steps=128).run()
    said = capsys.readouterr().out
    assert (
        "the engines have changed" in said
        and "before: rollout: step by step, the policy in C; update: C, without autograd" in said
    )


def test_the_machine_is_described():
    assert [name for name, _ in choose.describe_machine()] == ["rollout engine", "update engine"]


def test_minibatches_that_wait_for_the_gpu_go_through_autograd_from_then_on(monkeypatch: pytest.MonkeyPatch):
    tried = []

    def refuse(*args: Any) -> None:
        tried.append(args)
        raise NotCapturable("mine.py:7 waits for the GPU (if x > 0:)")

    env = envs.make("holdfast/RepeatPreviousEasy-v0", 4)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)
    ppo, engines = make_ppo(policy, hf.TrainConfig(num_envs=4, num_steps=4, minibatches=2))
    engines.on_gpu = True  # as if
    monkeypatch.setattr(choose, "GraphMinibatches", refuse)
    segment = next(hf.collect(env, policy, 4))
    for _ in range(2):
        assert type(ppo.engine_for(segment, ClippedLoss())) is Minibatches
        assert engines.update == ("autograd", "mine.py:7 waits for the GPU (if x > 0:)")
    assert len(tried) == 1
