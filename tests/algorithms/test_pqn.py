"""PQN: targets by hand, epsilon, masks, resuming; its policy acts greedily. Learning is in tests/learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast import envs
from holdfast.algorithms.pqn import PQN, QLambdaLoss
from holdfast.policies.heads import Greedy
from holdfast.rollout.exploration import EpsilonNoise
from holdfast.rollout.segment import Segment
from holdfast.runs.log import read_progress


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).unsqueeze(1)


def test_targets_by_hand():
    """gamma 0.5, lambda 0.5: the second step terminates, the fourth is truncated with V(final) = 8, the last goes on to 4."""
    flags = torch.zeros(5, 1, dtype=torch.bool)
    terminated, truncated = flags.clone(), flags.clone()
    terminated[1], truncated[3] = True, True
    segment = Segment(
        obs=flags, actions=flags.long(), resets=flags, rewards=column(1, 2, 3, 4, 5), terminated=terminated, truncated=truncated,
        valid=~flags, start_state={}, value=column(10, 20, 30, 40, 50), last_value=torch.tensor([4.0]),
        final_value=column(0, 0, 0, 8, 0),
    )  # fmt: skip
    found = QLambdaLoss(0.5, 0.5, 1.0).targets(segment).returns.squeeze(1).tolist()
    last = 5 + 0.5 * 4
    fourth = 4 + 0.5 * 8
    third = 3 + 0.5 * (0.5 * 40 + 0.5 * fourth)
    assert found == [1 + 0.5 * (0.5 * 20 + 0.5 * 2), 2.0, third, fourth, last]


def test_the_loss_by_hand_leaves_out_dummy_steps():
    q = torch.tensor([[1.0, 5.0], [2.0, 0.0], [7.0, 7.0]])
    flags = torch.zeros(3, 1, dtype=torch.bool)
    batch = Segment(
        obs=flags, actions=torch.tensor([[1], [0], [0]]), resets=flags, rewards=flags, terminated=flags, truncated=flags,
        valid=torch.tensor([[True], [True], [False]]), start_state={}, returns=column(4.0, 0.0, float("nan")),
    )  # fmt: skip
    terms = QLambdaLoss(0.9, 0.9, 1.0)(hf.PolicyOutput(Greedy(q), None, None), batch)
    assert terms["loss"].item() == 0.5 * (1.0 + 4.0) / 2 and terms["q_mean"].item() == 3.5


def test_a_greedy_policy_never_takes_a_forbidden_action_and_explores_among_the_others():
    q = torch.tensor([[3.0, 2.0, 1.0]]).expand(2000, 3)
    mask = torch.tensor([[False, True, True]]).expand(2000, 3)
    dist = Greedy(q, mask, start=5)
    assert dist.mode.unique().tolist() == [6] and dist.value.unique().tolist() == [2.0]
    noise = EpsilonNoise(2000, 3, torch.device("cpu"))
    for epsilon in (0.0, 0.5, 1.0):
        noise.epsilon.fill_(epsilon)
        actions = dist.sample(noise.advance(torch.zeros(2000, dtype=torch.bool)))
        share = float((actions == 7).float().mean())
        assert 5 not in actions and share == pytest.approx(epsilon / 2, abs=0.05)
    assert torch.equal(dist.sample(), dist.mode), "without noise nothing is random"


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, False, True]])])
def test_dueling_advantages_of_allowed_actions_have_mean_zero(mask: Any):
    torch.manual_seed(3)
    policy = hf.QNetwork(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), "gru", 8, dueling=True, layer_norm=True)
    features = torch.randn(1, 8)
    dist, value = policy.decode(features, mask)
    state_value = policy.state_value(policy.actor_head(policy.norm(features))).squeeze()
    allowed = dist.q[0] if mask is None else dist.q[0][mask[0]]
    assert float(allowed.mean()) == pytest.approx(float(state_value), abs=1e-6) and float(value) == float(allowed.max())


def test_only_one_choice_among_actions_can_be_learned():
    with pytest.raises(ValueError, match=r"needs one choice .*Box.*use --algorithm ppo"):
        hf.QNetwork(spaces.Discrete(2), spaces.Box(-1, 1, (2,)))


def config(folder: Path, **settings: Any) -> hf.PQNConfig:
    small: dict[str, Any] = dict(
        core="gru", hidden_size=8, num_envs=4, num_steps=16, bptt=8, minibatches=2, epochs=2, total_steps=4 * 16 * 8, device="cpu",
        checkpoint_every=3, replay_check_every=1, final_eval_episodes=2, tensorboard=False, quiet=True, run_dir=str(folder),
    )  # fmt: skip
    return hf.PQNConfig(**{**small, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        dict(core="lstm", refresh_states=True),
        dict(core="window", memory_span=5, dueling=True),
        dict(env="CartPole-v1", mask_velocity=True, precision="bf16"),
        dict(env="holdfast/PositionOnlyCartPoleEasy-v0", core="lru", head_sizes=(8,), inputs=("obs", "prev_action")),
    ],
)
def test_it_replays_what_it_played_and_resumes_to_the_same_rows(tmp_path: Path, settings: dict[str, Any]):
    trainer = hf.Trainer(config(tmp_path / "whole", **settings))
    assert isinstance(trainer.algorithm, PQN)
    trainer.run()
    rows = read_progress(tmp_path / "whole")
    assert max(float(row["memory/replay_gap"]) for row in rows) < (1e-2 if "precision" in settings else 1e-5)
    assert [float(row["train/epsilon"]) for row in rows] == pytest.approx(
        [trainer.algorithm.epsilon(i / 8) for i in range(8)]
    )
    if "CartPole-v1" in settings.values():
        return  # its state cannot be saved
    hf.Trainer.resume(
        tmp_path / "whole" / "checkpoints" / "update_00000003.pt", run_dir=str(tmp_path / "resumed")
    ).run()
    for mine, theirs in zip(read_progress(tmp_path / "resumed"), rows[3:], strict=True):
        kept = [name for name in theirs if not name.startswith("time/")]
        assert {name: mine[name] for name in kept} == {name: theirs[name] for name in kept}


def test_its_policy_is_loaded_shared_exported_run_and_examined(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    run = hf.Trainer(config(tmp_path / "run", dueling=True)).run().run_dir
    policy = hf.load(run)
    assert isinstance(policy, hf.QNetwork) and hf.doctor.examine(policy).ok
    hf.save_pretrained(policy, tmp_path / "shared")
    hf.export_policy(policy, tmp_path / "policy.onnx")
    runners = [hf.Runner(source) for source in (policy, hf.load(tmp_path / "shared"), tmp_path / "policy.onnx")]
    random = np.random.default_rng(1)
    for _ in range(20):
        obs, resets = random.integers(0, 4, 3), random.random(3) < 0.2
        actions = [
            runner.act(obs, resets=resets, deterministic=greedy).action for runner in runners for greedy in (True,)
        ]
        assert all((action == actions[0]).all() for action in actions)


def test_it_trains_with_action_masks(tmp_path: Path):
    from tables import MaskedTable

    env = lambda: MaskedTable(spaces.Discrete(4), spaces.Discrete(3), 1, 0, masks=True)  # noqa: E731
    result = hf.Trainer(config(tmp_path / "run"), env=env).run()
    assert result.updates == 8


def test_a_user_s_loop_collects_with_a_q_network():
    env = envs.make("holdfast/RepeatPreviousEasy-v0", 4)
    policy = hf.QNetwork(env.single_observation_space, env.single_action_space, "gru", 8)
    segment = next(hf.collect(env, policy, 8, records=("value", "params")))
    assert segment.params.shape == (8, 4, 4) and torch.equal(segment.params.amax(-1), segment.value)
