"""A critic that sees what the actor does not makes learning faster where rewards depend on it."""

from __future__ import annotations

import torch

import holdfast as hf
from privileged_env import LENGTH, LuckyRepeat

SEEDS = range(3)


def fraction_right(tmp_path, seed, critic_obs):
    """How often the cue is repeated, after training with a critic that sees these keys."""
    config = hf.TrainConfig(
        core="gru", hidden_size=32, num_envs=64, num_steps=16, total_steps=60_000, epochs=4, minibatches=4, seed=seed,
        learning_rate=2e-3, gamma=0.9, actor_obs=("policy",), critic_obs=critic_obs, normalize_obs=True, device="cpu",
        run_dir=str(tmp_path / f"{seed}-{len(critic_obs)}"), quiet=True, final_eval_episodes=1, tensorboard=False,
    )  # fmt: skip
    trainer = hf.Trainer(config, env=LuckyRepeat(64, luck=30.0))
    trainer.run()
    env = LuckyRepeat(500, luck=0.0)
    segment = next(hf.collect(env, trainer.policy, steps=LENGTH, seed=1000 + seed))
    return float(segment.rewards.mean())


def test_a_critic_that_sees_the_luck_learns_what_another_cannot_in_the_same_steps(tmp_path):
    sees = [fraction_right(tmp_path, seed, ("policy", "privileged")) for seed in SEEDS]
    blind = [fraction_right(tmp_path, seed, ("policy",)) for seed in SEEDS]
    print(f"with privileged {sees}, without {blind}")
    assert min(sees) > 0.95, sees
    assert torch.tensor(sees).mean() > torch.tensor(blind).mean() + 0.1, (sees, blind)
