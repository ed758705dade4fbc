"""Rewards of a model's own reach advantages, the reward scale, buffers and the log; the model continues where a run stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.runs.checkpoint import CheckpointError


class Surprise(hf.RewardModel):
    """How badly the number of right cards is guessed, from what is seen."""

    def __init__(self):
        super().__init__()
        self.guess = nn.Linear(1, 1)
        for p in self.guess.parameters():
            nn.init.constant_(p, 0.5)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        self.register_buffer("seen", torch.zeros(()))

    def error(self, segment):
        return (self.guess(segment.obs.float().unsqueeze(-1)).squeeze(-1) - 2.0).square()

    def reward(self, segment):
        self.seen += 1
        return self.error(segment)

    def update(self, segment):
        self.optimizer.zero_grad()
        self.error(segment).mean().backward()
        self.optimizer.step()


class One(hf.RewardModel):
    def reward(self, segment):
        return torch.ones_like(segment.rewards)


class Rows:
    def __init__(self):
        self.rows, self.segments = [], []

    def on_rollout_end(self, trainer, segment):
        self.segments.append(segment)

    def on_update_end(self, trainer, row):
        self.rows.append(row)


def settings(tmp_path, kind=hf.PPOConfig, **more):
    return kind(
        env="holdfast/RepeatPreviousEasy-v0", core="gru", hidden_size=8, num_envs=4, num_steps=16, quiet=True, tensorboard=False,
        final_eval_episodes=2, seed=3, run_dir=str(tmp_path / "run"), **{"total_steps": 256, **more},
    )  # fmt: skip


def played(tmp_path, name, model, kind=hf.PPOConfig, **more):
    rows = Rows()
    torch.manual_seed(0)
    trainer = hf.Trainer(settings(tmp_path / name, kind, **more), callbacks=[rows], reward_model=model)
    trainer.run()
    return trainer, rows


def test_the_rewards_reach_advantages_and_the_log_and_not_the_returns_of_episodes(tmp_path):
    _, plain = played(tmp_path, "plain", None)
    trainer, added = played(tmp_path, "added", One())
    before, after = plain.segments[0], added.segments[0]
    assert torch.equal(after.rewards, before.rewards + 1)
    gamma, gae_lambda = trainer.config.gamma, trainer.config.gae_lambda
    expected = hf.segment_advantages(before.changed(rewards=before.rewards + 1), gamma, gae_lambda)
    torch.testing.assert_close((after.advantage, after.returns), expected)
    assert [row["rollout/intrinsic_mean"] for row in added.rows] == [1.0] * 4
    assert "rollout/intrinsic_mean" not in plain.rows[0]
    assert list(after.episode_returns) == list(before.episode_returns)
    assert max(added.segments[-1].episode_returns) <= 1  # of the environment


def test_the_scale_of_rewards_is_that_of_all_rewards(tmp_path):
    found = [
        played(tmp_path, str(model), model, normalize_reward=True)[0].algorithm.reward_scale.value
        for model in (None, One())
    ]
    assert found[1] < 0.5 * found[0]


def test_a_buffer_keeps_the_sum(tmp_path):
    more = {"train_length": 8, "batch_size": 4, "buffer_size": 1000, "burn_in": 0, "warmup_steps": 64}
    trainer, rows = played(tmp_path, "r2d2", One(), hf.R2D2Config, **more)
    assert trainer.algorithm.buffer.sample(4, 8, 0).rewards[:-1].min() >= 1 - 1 / 48 - 1e-6
    assert rows.rows[-1]["rollout/intrinsic_mean"] == 1.0


def test_a_resumed_run_goes_on_with_the_model_as_it_was(tmp_path):
    def weights(trainer):
        model = trainer.reward_model
        moments = [leaf for state in model.optimizer.state.values() for leaf in state.values()]
        return [*model.state_dict().values(), *moments, *trainer.policy.state_dict().values()]

    whole, _ = played(tmp_path, "whole", Surprise())
    stopped, _ = played(tmp_path, "part", Surprise(), total_steps=128, lr_schedule="constant")
    torch.manual_seed(1)
    again = hf.Trainer.resume(stopped.folder.path, reward_model=Surprise())
    for a, b in zip(weights(again), weights(stopped)):
        assert torch.equal(a, b)
    assert again.reward_model.seen == 2 and whole.reward_model.seen == 4
    with pytest.raises(ValueError, match=r"was trained with a reward model: pass one"):
        hf.Trainer.resume(stopped.folder.path)
    plain, _ = played(tmp_path, "plain", None)
    with pytest.raises(CheckpointError, match="trained without a reward model"):
        hf.Trainer.resume(plain.folder.path, reward_model=Surprise())


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    constant = {
        "epochs": 2,
        "minibatches": 2,
        "lr_schedule": "constant",
        "clip_schedule": "constant",
        "entropy_schedule": "constant",
    }
    whole, _ = played(tmp_path, "whole", Surprise(), **constant)
    stopped, _ = played(tmp_path, "part", Surprise(), total_steps=128, **constant)
    again = hf.Trainer.resume(stopped.folder.path, reward_model=Surprise(), total_steps=256)
    again.run()
    for a, b in zip(again.policy.parameters(), whole.policy.parameters()):
        assert torch.equal(a, b)
    for a, b in zip(again.reward_model.parameters(), whole.reward_model.parameters()):
        assert torch.equal(a, b)


def test_what_does_not_fit_is_said(tmp_path):
    with pytest.raises(TypeError, match=r"reward_model is a Linear, expected an hf.RewardModel"):
        hf.Trainer(settings(tmp_path), reward_model=nn.Linear(1, 1))
    wrong = type("Wrong", (One,), {"reward": lambda self, segment: segment.rewards.sum(0)})
    with pytest.raises(ValueError, match=r"Wrong.reward gave \[4\], expected a tensor \[T, B\] = \[16, 4\]"):
        hf.Trainer(settings(tmp_path), reward_model=wrong()).run()
