"""A script written for sb3-contrib, with one import changed.

python examples/sb3_recurrent_ppo.py              # CartPole without velocities: about a minute on one core
python examples/sb3_recurrent_ppo.py --core gru   # a core that sb3-contrib does not have
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from holdfast.envs import VelocityMask
from holdfast.integrations.sb3 import RecurrentPPO  # was: from sb3_contrib import RecurrentPPO


def make_env(n_envs: int):
    return make_vec_env(lambda: VelocityMask(gym.make("CartPole-v1")), n_envs=n_envs, seed=0)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--core", default="lstm")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)

    model = RecurrentPPO(
        "MlpLstmPolicy", make_env(8), n_steps=128, batch_size=128, seed=1, device="cpu",
        policy_kwargs={"lstm_hidden_size": 64, "core": args.core},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model.learn(args.steps, callback=CheckpointCallback(args.steps // 16, folder))
        model.save(Path(folder) / "model")
        model = RecurrentPPO.load(Path(folder) / "model", env=make_env(8))

    env = make_env(1)
    mean, std = evaluate_policy(model, env, n_eval_episodes=10)
    print(f"mean return of 10 episodes: {mean:.1f} +- {std:.1f}")

    # The same by hand: the caller carries the state, and predict resets it where an episode starts.
    obs, state, start = env.reset(), None, np.ones(1, dtype=bool)
    for _ in range(20):
        action, state = model.predict(obs, state, start, deterministic=True)
        obs, _, start, _ = env.step(action)
    return {"mean_return": float(mean)}


if __name__ == "__main__":
    main()
